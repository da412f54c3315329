"""A local web server that behaves and fails like servers of the internet."""

import random
import threading
from collections import defaultdict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GOOD = random.Random(5).randbytes(300_000)  # the content of a file


@dataclass
class Reply:
    """What the server does with one request."""

    content: bytes = GOOD
    status: int = 200
    ranges: bool = True  # whether it supports Range headers
    cut: int | None = None  # closes the connection after so many bytes of the body
    location: str | None = None


class Site(ThreadingHTTPServer):
    """A local server. It has a list of replies for each path, and repeats the last one."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies = {}
        self.seen = defaultdict(list)  # path -> Range headers of its requests

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,)).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def put(self, name, *replies):
        """Set the replies for *name*, and return its address."""
        self.replies["/" + name] = list(replies)
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        asked = self.headers.get("Range")
        self.server.seen[self.path.lstrip("/")].append(asked)
        replies = self.server.replies.get(self.path, [Reply(b"gone", 404)])
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        content, status, start = reply.content, reply.status, 0
        if asked and reply.ranges and status == 200:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            status = 206 if start < len(content) else 416
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if reply.location:
            self.send_header("Location", reply.location)
        body = b"" if status == 416 else content[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if reply.cut is None else body[: reply.cut])
