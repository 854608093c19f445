"""``cachesvc layout``: what it prints, what fits, and what it refuses with one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cachesvc_client.layouts.families import gqa_windowed, mla
from cachesvc_ctl.layout import block_pages, describe_layers, fit, sequence_pages
from cachesvc_ctl.main import main

from cachesvc.model.layout import device_bytes

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
GIB = 1 << 30
WINDOWED = gqa_windowed(
    window_layers=[False, True], kv_heads=1, head_dim=5, block_tokens=16, window_tokens=33, sink_tokens=17
)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command to its end: exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cachesvc", "layout", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


def config(name: str) -> str:
    return str(CONFIGS / f"{name}.json")


def test_a_sparse_model_with_its_draft(call: Any) -> None:
    code, text, _ = call(config("deepseek-v3.2"), "--tp", "8", "--mtp", "--memory", "40GiB")
    assert code == 0
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0].startswith("deepseek_v32: 62 layers, 8 ranks, blocks of 64 tokens, layout ")
    for line in (
        "full latent 61 0-60 1 x 64 x 656 uint8 41,984",
        "full index_key 61 0-60 64 x 128 uint8 8,192",
        "full index_scale 61 0-60 64 x 4 uint8 256",
        "draft_full index_scale 1 61 64 x 4 uint8 256",
        "full none none the same bytes 3,076,352 24,610,816 3,076,352",
        "one rank 48,856 3,126,784 2.98 MiB",
        "all ranks 390,848 25,014,272 23.86 MiB",
        "40.00 GiB on each rank hold 13,736 blocks = 879,104 tokens that are kept in every group",
    ):
        assert line in lines
    assert max(map(len, text.splitlines())) <= 120


def test_windows_and_sequences(call: Any) -> None:
    flags = (config("gpt-oss-20b"), "--tp", "4", "--memory", "40GiB")
    code, text, _ = call(*flags, "--sequence-tokens", "32768")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert code == 0
    for line in (
        "full k 12 1-23 by 2 2 x 64 x 64 bfloat16 16,384",
        "window v 12 0-22 by 2 2 x 64 x 64 bfloat16 16,384",
        "window 128 tokens none its own heads 393,216 1,572,864 1,572,864",
        "or 212 sequences of 32,768 tokens while they decode (106 if nothing fell out of the windows)",
        "full 512 108,544",
        "window 3 636",
    ):
        assert line in lines
    assert "--sequence-tokens N counts" in call(*flags)[1]


def test_json_says_the_same(call: Any) -> None:
    code, text, _ = call(config("deepseek-v3"), "--tp", "2", "--memory", "1GiB", "--sequence-tokens", "1000", "--json")
    document = json.loads(text)
    assert code == 0
    assert document["block_bytes"] == {"rank": 4_497_408, "devices": 2 * 4_497_408, "host": 4_497_408}
    assert document["token_bytes"] == {"rank": 70_272, "devices": 2 * 70_272, "host": 70_272}
    assert document["planes"][0]["layers"] == list(range(61))
    assert document["groups"][0]["window_tokens"] is None
    assert document["blocks"]["count"] == GIB // 4_497_408
    assert document["sequences"] == {"count": 14, "unit_pages": [16], "pages": [224], "used_bytes": 224 * 4_497_408}
    layout = mla(layers=61, kv_lora_rank=512, rope_dim=64, block_tokens=64, tensor_parallel=2)
    assert document["fingerprint"] == layout.fingerprint.hex()


def test_a_folder_and_every_config(call: Any, tmp_path: Path) -> None:
    for path in CONFIGS.glob("*.json"):
        (tmp_path / "config.json").write_bytes(path.read_bytes())
        code, text, errors = call(str(tmp_path), "--block-tokens", "16")
        assert (code, errors) == (0, "")
        assert "blocks of 16 tokens" in text


@pytest.mark.parametrize(
    ("contents", "flags", "words"),
    [
        (None, [], "cannot read "),
        ("no json", [], "is no JSON: Expecting value"),
        ("\x00\xff", [], "is no JSON"),
        ("[" * 100_000, [], "is no JSON"),
        ("[]", [], "holds no JSON object"),
        ("{}", [], "unknown model_type None; known are deepseek_v2,"),
        ('{"model_type": "bert"}', [], "unknown model_type 'bert'"),
        ('{"model_type": "llama"}', [], "config of llama has no num_attention_heads"),
        ("llama", ["--tp", "3"], "8 kv heads do not divide over 3 ranks"),
        ("llama", ["--tp", "0"], "do not divide over 0 ranks"),
        ("llama", ["--block-tokens", "0"], "block_tokens must be in 1..4096"),
        ("llama", ["--block-tokens", "-64"], "block_tokens must be in 1..4096"),
        ("llama", ["--kv-dtype", "int4"], "unknown dtype 'int4'"),
        ("llama", ["--scale-dtype", "fp32"], "belong to values of one byte"),
        ("llama", ["--mtp"], "names no MTP layers"),
        ("llama", ["--memory", "lots"], "'lots' is not a size"),
        ("llama", ["--memory", "8MiB", "--sequence-tokens", "0"], "--sequence-tokens must be in"),
        ("llama", ["--memory", "8MB"], "--memory 8MB holds no block"),
        ("llama", ["--memory", "8191KiB"], "--memory 8191KiB holds no block: one takes 8,388,608 bytes on each rank"),
        ("llama", ["--sequence-tokens", "5"], "give --memory or --gpu-memory too"),
    ],
)
def test_bad_input_gets_one_line(call: Any, tmp_path: Path, contents: str | None, flags: list[str], words: str) -> None:
    path = tmp_path / "config.json"
    if contents is not None:
        path.write_text((CONFIGS / "llama-3.1-8b.json").read_text() if contents == "llama" else contents)
    code, text, errors = call(str(path), *flags)
    assert (code, text) == (2, "")
    assert words in errors
    assert errors.startswith("cachesvc: ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(("text", "size"), [("2g", 2 << 30), ("16Gi", 16 << 30), ("2GB", 2 * 10**9)])
def test_memory_is_written_as_the_daemons_sizes_are(call: Any, text: str, size: int) -> None:
    code, shown, _ = call(config("llama-3.1-8b"), "--memory", text, "--json")
    assert (code, json.loads(shown)["memory_bytes"]) == (0, size)


@pytest.mark.parametrize("unit", [(1, 1), (5, 2), (1, 9)])
def test_what_fits_is_the_most_that_fits(unit: tuple[int, int]) -> None:
    for memory_bytes in (*range(0, 20_000, 977), 123_456_789):
        fitted = fit(WINDOWED, unit, memory_bytes)
        assert fitted.pages == tuple(fitted.count * each for each in unit)
        assert fitted.used_bytes == device_bytes(WINDOWED, fitted.pages) <= memory_bytes
        assert device_bytes(WINDOWED, tuple((fitted.count + 1) * each for each in unit)) > memory_bytes


def test_pages_of_a_sequence() -> None:
    assert block_pages(WINDOWED) == (1, 1)
    # Sinks of 17 tokens lie in 2 blocks, a window of 33 in 3 at most.
    lengths = (1, 16, 17, 80, 81, 1000)
    assert [sequence_pages(WINDOWED, n) for n in lengths] == [(1, 1), (1, 1), (2, 2), (5, 5), (6, 5), (63, 5)]


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([0], "0"),
        ([0, 1], "0-1"),
        (range(61), "0-60"),
        (range(0, 24, 2), "0-22 by 2"),
        ([1, 5], "1, 5"),
        ([0, 1, 2, 4, 6, 7], "0-2, 4, 6-7"),
        ([i for i in range(62) if (i + 1) % 6], "0-4, 6-10, ... 54-58, 60-61"),
    ],
)
def test_layers_in_short(layers: list[int], text: str) -> None:
    assert describe_layers(layers) == text


def test_windows_head_by_head_tell_what_their_padding_costs(call: Any, tmp_path: Path) -> None:
    marks = [[layer % 2 == 0 and head < 3 for head in range(8)] for layer in range(32)]
    file = tmp_path / "heads.json"
    file.write_text(json.dumps(marks))
    windows = ("--window-heads", str(file), "--window-tokens", "1024")
    arguments = (config("llama-3.1-8b"), "--tp", "2", *windows)
    code, text, _ = call(*arguments)
    assert code == 0
    row = 2 * 64 * 128 * 2  # k and v of one head, bf16
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert f"window k 16 0-30 by 2 3 x 64 x 128 bfloat16 {3 * row // 2:,}" in lines
    held, whole = 32 * 8 * row, 2 * (16 * 7 + 16 * 4) * row
    wasted = f"{16 * 3 * row:,} in full, {16 * 3 * row:,} in window"
    assert f"{whole - held:,} of the {whole:,} bytes of a block on all ranks hold no head ({wasted})," in lines
    assert max(map(len, text.splitlines())) <= 120
    document = json.loads(call(*arguments, "--json")[1])
    assert document["padding_bytes"] == {"full": 16 * 3 * row, "window": 16 * 3 * row}
    assert document["block_bytes"]["devices"] == whole

    for given, said in (
        (arguments[:5], "give --window-tokens too"),
        ((config("llama-3.1-8b"), "--sink-tokens", "4"), "give it too"),
        ((config("gpt-oss-20b"), *windows), "own layers have windows"),
        ((config("deepseek-v3"), *windows), "no windows head by head"),
        ((config("qwen3-8b"), *windows), "need 36 layers of 8 kv heads"),
    ):
        code, _, error = call(*given)
        assert (code, said in error, error.count("\n")) in ((1, True, 1), (2, True, 1)), error
    for content in ("[[1]]", "{}", "[true]", "["):
        file.write_text(content)
        assert call(*arguments)[0] == 2


def test_a_plan_names_pools_flags_and_requests(call: Any) -> None:
    wish = (config("llama-3.1-8b"), "--gpu-memory", "80GiB", "--weights", "15GiB")
    code, out, _ = call(*wish, "--json")
    plan = json.loads(out)["plan"]
    assert (code, plan["device_pool_bytes"], plan["host_pool_bytes"]) == (0, 60 * GIB, 180 * GIB)
    assert plan["kv_cache_memory_bytes"] <= plan["device_pool_bytes"]
    assert plan["tokens"] == plan["kv_cache_memory_bytes"] // (128 << 10), "an 8B model has 128 KiB a token"
    assert (plan["requests"], plan["gpu_memory_utilization"]) == (plan["tokens"] // 32768, 0.22)
    code, out, _ = call(*wish, "--sequence-tokens", "8192")
    assert (code, "cachesvcd --device-pool 60GiB --host-pool 180GiB" in out) == (0, True)
    assert "60 requests of 8,192 at a time." in out


def test_a_plan_that_does_not_fit_says_what_to_try(call: Any) -> None:
    wish = (config("llama-3.1-8b"), "--gpu-memory", "24GiB")
    code, _, err = call(*wish, "--weights", "30GiB")
    assert (code, "leave no pool; try --tp 2 leaves 4.00 GiB, or quantised weights" in err) == (2, True)
    code, out, _ = call(*wish, "--weights", "16GiB", "--sequence-tokens", "131072")
    assert (code, "less than one request: try --tp 2, --kv-dtype fp8" in out) == (0, True)


def test_a_plan_takes_the_weights_beside_the_configuration(call: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(Path(config("llama-3.1-8b")).read_text(encoding="utf-8"), encoding="utf-8")
    assert call(str(tmp_path), "--gpu-memory", "80GiB")[2].startswith("cachesvc: there are no weights beside")
    for name in ("a.safetensors", "b.safetensors", "consolidated.safetensors", "a.bin"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(8 * GIB)
    _, out, _ = call(str(tmp_path), "--gpu-memory", "80GiB", "--json")
    assert json.loads(out)["plan"]["weights_bytes"] == 16 * GIB, "safetensors, and not the same in another form"
    assert "a local file: download" in call("openai/gpt-oss-20b/config.json")[2]
