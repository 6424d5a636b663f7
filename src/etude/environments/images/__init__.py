"""Images, which are root filesystems for machines, and builders for them.

An image is stored in a folder of this host and named by the digest of its content.

>>> import asyncio, pathlib, tempfile
>>> with tempfile.TemporaryDirectory() as at:
...     store = ImageStore(f"{at}/images")
...     _ = pathlib.Path(at, "Dockerfile").write_text("FROM scratch\\nENV A=1\\nWORKDIR /work\\nCOPY Dockerfile f\\n")
...     record = asyncio.run(build_from_dockerfile(store, at))
...     print(record.image.workdir, record.image.env, [entry.path for entry in store.listing(record.image.digest)])
/work {'A': '1'} ['', 'work', 'work/f']
"""

from etude.environments.images.debian import build_from_debian
from etude.environments.images.directory import build_from_directory
from etude.environments.images.dockerfile_build import build_from_dockerfile
from etude.environments.images.layers import ChangeExporter
from etude.environments.images.limits import BadSource, ImageLimits
from etude.environments.images.objects import objects_of, scan_objects
from etude.environments.images.oci import build_from_oci
from etude.environments.images.records import ImageRecord
from etude.environments.images.repository import build_from_repository
from etude.environments.images.store import ImageStore, default_store

__all__ = [
    "BadSource", "ChangeExporter", "ImageLimits", "ImageRecord", "ImageStore", "build_from_debian",
    "build_from_directory", "build_from_dockerfile", "build_from_oci", "build_from_repository", "default_store",
    "objects_of", "scan_objects",
]  # fmt: skip
