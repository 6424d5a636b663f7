"""An S3 server for tests: moto on loopback, with a bucket `etude`. Prints its URL; ends at the end of its input.

It handles one request at a time, since moto compares an ETag and then writes without a lock.
It checks no signature and no digest, and forgets everything when it ends.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class Quiet(WSGIRequestHandler):
    """Writes no access log."""

    def log(self, type: str, message: str, *args: object) -> None:
        pass


def main() -> None:
    app, alone = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def serve(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with alone:
            return app(environ, start_response)

    server = make_server("127.0.0.1", 0, serve, threaded=True, request_handler=Quiet)
    url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    access = {"aws_access_key_id": "an-id", "aws_secret_access_key": "a-secret", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=url, **access).create_bucket(Bucket="etude")
    print(url, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
