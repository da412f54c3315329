"""The command fairseq-rope: its tools, their help and their version."""

import pytest

from fairseq_rope import __file__ as package
from fairseq_rope import __version__
from fairseq_rope.__main__ import TOOLS, main


@pytest.mark.parametrize("tool", [(), *((name,) for name in TOOLS)])
def test_help_shows_an_example_on_one_line_and_the_version_is_printed(capsys, tool):
    for flag in ("--help", "--version"):
        with pytest.raises(SystemExit) as ended:
            main([*tool, flag])
        assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    name = " ".join(("fairseq-rope", *tool))
    assert lines[-1] == f"{name} {__version__}"
    example = lines[lines.index("example:") + 1]
    assert example.startswith(f"  {name} ") and len(example) > len(name) + 20


def test_every_tool_is_listed_and_the_path_for_user_dir_is_printed(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(f"  {name:15} {what}\n" in printed for name, what in TOOLS.items())
    main(["--user-dir"])
    assert capsys.readouterr().out == package[: -len("/__init__.py")] + "\n"
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert f"a tool is needed: {', '.join(TOOLS)}" in capsys.readouterr().err
