"""A model that sees one image (BLIP-2), with its tokenizer and processor, as files that vLLM reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY, IMAGE_PIXELS, IMAGE_TOKENS = 512, 56, 8
SPECIAL = ("<pad>", "<s>", "</s>", "<image>")

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}, "dtype": "bfloat16"}
"""Further options of an engine with images."""

VISION = {
    "model_type": "blip_2_vision_model",
    "hidden_size": 64,
    "image_size": IMAGE_PIXELS,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 14,
}
QFORMER = {
    "model_type": "blip_2_qformer",
    "encoder_hidden_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
}
TEXT = {
    "model_type": "opt",
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "ffn_dim": 256,
    "hidden_size": 128,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "vocab_size": VOCABULARY,
    "word_embed_proj_dim": 128,
}
MODEL = {
    "architectures": ["Blip2ForConditionalGeneration"],
    "model_type": "blip-2",
    "image_token_index": SPECIAL.index("<image>"),
    "num_query_tokens": IMAGE_TOKENS,
    "qformer_config": QFORMER,
    "text_config": TEXT,
    "vision_config": VISION,
}
PROCESSOR = {
    "processor_class": "Blip2Processor",
    "num_query_tokens": IMAGE_TOKENS,
    "image_processor": {
        "image_processor_type": "BlipImageProcessor",
        "size": {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS},
    },
}
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>", "pad_token": "<pad>", "unk_token": "<pad>"}
TOKENIZER = {
    "backend": "tokenizers",
    "processor_class": "Blip2Processor",
    "tokenizer_class": "TokenizersBackend",
    **NAMES,
}


def write_image_model(folder: Path) -> None:
    """All files but weights, which are dummies."""
    vocabulary = {name: at for at, name in enumerate(SPECIAL)}
    vocabulary |= {f"t{at}": at for at in range(len(SPECIAL), VOCABULARY)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    words = {
        "version": "1.0",
        "added_tokens": [{"id": at, "content": name, **flags} for at, name in enumerate(SPECIAL)],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<pad>"},
    }
    files = {"config": MODEL, "processor_config": PROCESSOR, "tokenizer_config": TOKENIZER, "tokenizer": words}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
