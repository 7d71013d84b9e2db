"""Says at once what the first run lacks: a GPU, memory on it, vLLM, a model."""

import argparse
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

NEEDED_GIB = 20
"""Free memory of the GPU: for 0.6 B parameters, their optimizer state, a reference policy and vLLM."""
INSTALL = 'pip install -c constraints/gpu.txt -e ".[gpu,vllm]"'


def missing(*, device: str, rollout: str, model: str) -> Iterator[str]:
    """What is missing, and the remedy, one line each."""
    if device == "gpu":
        yield from missing_gpu()
    if rollout == "vllm" and find_spec("vllm") is None:
        yield f"vLLM is not installed: {INSTALL}"
    if model and not (Path(model) / "config.json").is_file():
        yield f"MODEL={model}: expected the folder of a Hugging Face model, found no config.json in it"


def missing_gpu() -> Iterator[str]:
    """What is missing of the GPU."""
    if torch.version.cuda is None:
        yield f"torch {torch.__version__} has no CUDA: {INSTALL}"
    elif not torch.cuda.is_available():
        yield f"torch {torch.__version__} sees no GPU: compare its CUDA {torch.version.cuda} with that of nvidia-smi"
    else:
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
        if free < NEEDED_GIB:
            name = torch.cuda.get_device_name()
            yield f"{name}: {free:.0f} of {total:.0f} GiB are free, {NEEDED_GIB} are needed; end what else runs on it"


def main() -> None:
    """Exit with code 2 if anything is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("device", "rollout", "model"):
        parser.add_argument(name)
    lines = list(missing(**vars(parser.parse_args())))
    for line in lines:
        print(f"gpu_first_run: {line}", file=sys.stderr)
    if lines:
        sys.exit(2)


if __name__ == "__main__":
    main()
