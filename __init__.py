"""Not the plugin. ``--user-dir`` of this folder is refused with the path of the plugin, ``fairseq_rope``."""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# fairseq.utils.import_user_module notes each --user-dir that it imports.
importer = getattr(sys.modules.get("fairseq.utils"), "import_user_module", None)
if HERE in getattr(importer, "memo", ()):
    sys.exit(f"--user-dir {HERE}: must be the folder of the plugin, {os.path.join(HERE, 'fairseq_rope')}")
