"""transformers' processor for Qwen2.5-VL without videos, whose part needs torchvision."""

from typing import Any

from transformers import Qwen2_5_VLProcessor as ProcessorWithVideos


class Qwen2_5_VLProcessor(ProcessorWithVideos):  # noqa: N801 (verl knows processors by this name)
    """Text and images."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
