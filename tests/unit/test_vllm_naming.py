"""Two engines share exactly where everything agrees that decides bytes or keys."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cachesvc_vllm.checkpoint import checkpoint_digest
from cachesvc_vllm.errors import ConnectorRefused
from cachesvc_vllm.file_digests import FileDigests, Progress, new_hasher
from cachesvc_vllm.naming import Runtime, display_name, model_facts, model_name

from tests.unit.vllm_rig import (
    FullAttentionSpec,
    HubConfig,
    KVCacheConfig,
    LoRAConfig,
    layers_outermost,
    vllm_config,
)

RUNTIME = Runtime(
    release="0.32.0",
    python="3.11",
    hash_root="vllm-none-hash",
    backends=("CPU_ATTN",),
    packages={"torch": "2.13.0"},
    processor="x86_64",
    environment={"VLLM_BATCH_INVARIANT": False, "VLLM_DP_RANK": 0},
)
NGRAM = SimpleNamespace(method="ngram", use_eagle=lambda: False, draft_model_config=None)


def name(
    config: Any = None, kv: KVCacheConfig | None = None, runtime: Runtime = RUNTIME, weights: str | None = None
) -> str:
    """Of an engine."""
    return model_name(model_facts(config or vllm_config(), kv or layers_outermost(), weights, runtime))


def changed(part: str, field: str, value: Any) -> Any:
    """A configuration in which one thing is another."""
    config = vllm_config()
    setattr(getattr(config, part) if part else config, field, value)
    return config


def test_the_identity_is_a_digest_alone_and_the_name_is_for_operators() -> None:
    assert name().startswith("vllm-")
    assert "tiny" not in name()
    assert display_name("/models/tiny") == "tiny"
    assert display_name("org/tiny") == "tiny"
    assert display_name("/models/ti\x1b[2J\nny") == "ti?[2J?ny"
    assert display_name("/models/" + "\u00e9" * 100) == "\u00e9" * 64


@pytest.mark.parametrize(
    "other",
    [
        lambda: name(kv=layers_outermost(blocks=1024)),
        lambda: name(changed("model_config", "model", "/elsewhere/other")),
        lambda: name(changed("model_config", "max_model_len", 4096)),
        lambda: name(changed("model_config", "hf_config", HubConfig(_name_or_path="/elsewhere"))),
        lambda: name(changed("cache_config", "num_gpu_blocks", 99)),
        lambda: name(changed("parallel_config", "data_parallel_rank", 1)),
        lambda: name(changed("kv_transfer_config", "engine_id", "two")),
        lambda: name(runtime=replace(RUNTIME, environment={**RUNTIME.environment, "VLLM_DP_RANK": 1})),
    ],
)
def test_what_decides_no_byte_does_not_keep_engines_apart(other: Callable[[], str]) -> None:
    assert other() == name()


@pytest.mark.parametrize(
    "other",
    [
        lambda: name(changed("model_config", "seed", 1)),
        lambda: name(changed("model_config", "dtype", "torch.float16")),
        lambda: name(changed("model_config", "quantization", "fp8")),
        lambda: name(changed("model_config", "quantization_config", {"linear": "fp8_per_block"})),
        lambda: name(changed("model_config", "model_impl", "transformers")),
        lambda: name(changed("model_config", "an_option_of_the_next_release", True)),
        lambda: name(changed("", "a_part_of_the_next_release", SimpleNamespace(on=True))),
        lambda: name(changed("model_config", "hf_config", HubConfig(num_hidden_layers=7))),
        lambda: name(changed("cache_config", "cache_dtype", "fp8")),
        lambda: name(changed("cache_config", "prefix_caching_hash_algo", "sha256_cbor")),
        lambda: name(changed("parallel_config", "tensor_parallel_size", 2)),
        lambda: name(changed("parallel_config", "pipeline_parallel_size", 2)),
        lambda: name(changed("parallel_config", "decode_context_parallel_size", 2)),
        lambda: name(changed("device_config", "device_type", "cuda")),
        lambda: name(changed("", "speculative_config", NGRAM)),
        lambda: name(changed("", "lora_config", LoRAConfig(max_loras=1, target_modules=None))),
        lambda: name(kv=replace(layers_outermost(), kv_cache_layout="BLHNC")),
        lambda: name(
            kv=replace(layers_outermost(), kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec(16))])
        ),
        lambda: name(runtime=replace(RUNTIME, backends=("FLASH_ATTN",))),
        lambda: name(runtime=replace(RUNTIME, hash_root="17")),
        lambda: name(runtime=replace(RUNTIME, python="3.12")),
        lambda: name(runtime=replace(RUNTIME, release="0.32.1")),
        lambda: name(runtime=replace(RUNTIME, packages={"torch": "2.14.0"})),
        lambda: name(runtime=replace(RUNTIME, processor="NVIDIA H200, sm_90")),
        lambda: name(runtime=replace(RUNTIME, environment={"VLLM_BATCH_INVARIANT": True})),
        lambda: name(weights="mine@2"),
    ],
)
def test_one_difference_keeps_engines_apart(other: Callable[[], str]) -> None:
    assert other() != name()


@pytest.mark.parametrize(("kind", "is_apart"), [("longrope", True), ("of_the_next_release", True), ("yarn", False)])
def test_the_longest_sequence_counts_where_position_embeddings_may_look_at_it(kind: str, is_apart: bool) -> None:
    def of(length: int) -> str:
        config = changed("model_config", "max_model_len", length)
        config.model_config.hf_text_config = HubConfig(rope_parameters={"rope_type": kind, "factor": 4.0})
        return name(config)

    assert (of(1000) != of(2000)) == is_apart


def test_how_adapters_are_computed_keeps_engines_apart_and_how_many_there_are_does_not() -> None:
    def lora(**changes: Any) -> str:
        settings = {"max_loras": 1, "max_lora_rank": 16, "target_modules": None, **changes}
        return name(changed("", "lora_config", LoRAConfig(**settings)))

    assert lora() == lora(max_loras=8)
    assert lora() != lora(target_modules=["o_proj"])


def test_what_only_pickles_depend_on_does_not_keep_others_apart() -> None:
    cbor = changed("cache_config", "prefix_caching_hash_algo", "sha256_cbor")
    assert name(cbor) == name(cbor, runtime=replace(RUNTIME, python="3.12"))


# -- the checkpoint ----------------------------------------------------------------------------------------------------


@pytest.fixture
def digests(tmp_path: Path) -> FileDigests:
    return FileDigests(tmp_path / "digests")


def write(folder: Path, size_bytes: int = 1 << 20, seed: int = 0) -> Path:
    """A checkpoint of one file of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(random.Random(seed).randbytes(size_bytes))
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder


def test_each_single_edit_of_a_checkpoint_changes_its_digest(tmp_path: Path, digests: FileDigests) -> None:
    folder, rng = write(tmp_path / "model", 16 << 20), random.Random(5)
    first = checkpoint_digest(str(folder), None, digests)
    weights, found = folder / "model.safetensors", set()
    for _ in range(60):
        size, status = rng.choice([1, 128, 8 << 10, 64 << 10, 1 << 20]), weights.stat()
        at = rng.randrange((16 << 20) - size)
        with weights.open("r+b") as file:
            file.seek(at)
            before = file.read(size)
            file.seek(at)
            file.write(bytes(each ^ 0xFF for each in before))
        os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
        found.add(checkpoint_digest(str(folder), None, digests))
    assert len(found - {first}) == 60


def test_a_folder_may_be_called_anything_and_its_files_may_not(tmp_path: Path, digests: FileDigests) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "deep" / "two")
    assert checkpoint_digest(str(one), None, digests) == checkpoint_digest(str(two), None, digests)
    (two / "generation_config.json").write_text('{"temperature": 0.7}', encoding="utf-8")
    assert checkpoint_digest(str(one), None, digests) == checkpoint_digest(str(two), None, digests)
    (two / "modeling_two.py").write_text("SCALE = 2", encoding="utf-8")
    assert checkpoint_digest(str(one), None, digests) != checkpoint_digest(str(two), None, digests)


def test_a_link_into_the_hubs_cache_is_its_blobs_name_and_is_not_read(tmp_path: Path, digests: FileDigests) -> None:
    blobs = tmp_path / "models--org--m" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / ("ab" * 32)).write_bytes(b"weights")
    (blobs / ("cd" * 20)).write_bytes(b"{}")  # of git: no digest of the bytes alone
    snapshot = tmp_path / "models--org--m" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blobs / ("ab" * 32))
    (snapshot / "config.json").symlink_to(blobs / ("cd" * 20))
    first = checkpoint_digest(str(snapshot), None, digests)
    (blobs / ("ab" * 32)).write_bytes(b"Weights")  # nothing does that; it shows that nothing reads them
    assert checkpoint_digest(str(snapshot), None, digests) == first
    (blobs / ("cd" * 20)).write_bytes(b"[]")
    assert checkpoint_digest(str(snapshot), None, digests) != first


def test_a_name_on_a_hub_is_a_commit_and_never_a_branch(digests: FileDigests) -> None:
    assert checkpoint_digest("org/model", "ab" * 20, digests) == f"org/model@{'ab' * 20}"
    for revision in (None, "main", "v1.0", "ab" * 10):
        with pytest.raises(FileNotFoundError, match="may move"):
            checkpoint_digest("org/model", revision, digests)


def test_weights_that_cannot_be_told_are_refused_with_what_to_do(tmp_path: Path) -> None:
    config = changed("load_config", "load_format", "auto")
    config.model_config.model = str(tmp_path)
    with pytest.raises(ConnectorRefused, match='by "model" in kv_connector_extra_config'):
        name(config)


def test_a_second_start_reads_nothing_and_a_changed_file_is_read_again(tmp_path: Path, digests: FileDigests) -> None:
    path = write(tmp_path / "model") / "model.safetensors"
    read: list[int] = []

    class Counted(Progress):
        def add(self, size_bytes: int) -> None:
            read.append(size_bytes)

    first = digests.digest(path, Counted(0))
    assert digests.digest(path, Counted(0)) == first
    assert FileDigests(tmp_path / "digests").digest(path, Counted(0)) == first
    assert read == [1 << 20]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert digests.digest(path, Counted(0)) != first
    assert len(read) == 2


@pytest.mark.parametrize("damage", [b"", b"blake2b:zz", b"\xff\xfe", b"x" * 100_000])
def test_an_entry_that_is_none_is_written_again(tmp_path: Path, digests: FileDigests, damage: bytes) -> None:
    path = write(tmp_path / "model") / "model.safetensors"
    first = digests.digest(path)
    (entry,) = [each for each in (tmp_path / "digests").iterdir() if not each.suffix]
    entry.write_bytes(damage)
    assert digests.digest(path) == first
    assert entry.read_text(encoding="ascii") == first


def test_what_another_user_may_write_is_not_believed(tmp_path: Path) -> None:
    path, folder = write(tmp_path / "model") / "model.safetensors", tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    first = FileDigests(folder).digest(path)
    assert list(folder.iterdir()) == []
    folder.chmod(0o700)
    assert FileDigests(folder).digest(path) == first
    (entry,) = [each for each in folder.iterdir() if not each.suffix]
    entry.write_text(f"blake2b:{'0' * 64}", encoding="ascii")
    entry.chmod(0o666)
    assert FileDigests(folder).digest(path) == first


def test_where_nothing_can_be_kept_files_are_hashed_each_time(tmp_path: Path) -> None:
    path, blocked = write(tmp_path / "model") / "model.safetensors", tmp_path / "file"
    blocked.write_bytes(b"")
    nowhere = FileDigests(blocked / "digests")
    assert nowhere.digest(path) == nowhere.digest(path) == FileDigests(tmp_path / "kept").digest(path)


def test_engines_that_start_together_hash_a_file_once(tmp_path: Path) -> None:
    path = write(tmp_path / "model", 32 << 20) / "model.safetensors"
    program = """
import sys
from pathlib import Path
from cachesvc_vllm.file_digests import FileDigests, Progress
class Counted(Progress):
    read = 0
    def add(self, size_bytes): Counted.read += size_bytes
print(FileDigests(Path(sys.argv[1])).digest(Path(sys.argv[2]), Counted(0)), Counted.read)
"""
    command: Sequence[str] = [sys.executable, "-c", program, str(tmp_path / "digests"), str(path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate()[0].split() for process in running]
    assert len({digest for digest, _ in said}) == 1
    assert sum(int(read) for _, read in said) == 32 << 20


def test_long_hashing_tells_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cachesvc_vllm.file_digests")
    times = iter([0.0, 1.0, 6.0, 7.0, 12.0])
    progress = Progress(4 << 30, lambda: next(times))
    for _ in range(4):
        progress.add(1 << 30)
    told = [each.getMessage() for each in caplog.records]
    assert [each.split()[1] for each in told] == ["done_gib=2.0", "done_gib=4.0"]


def test_the_algorithm_is_a_part_of_the_digest(tmp_path: Path, digests: FileDigests) -> None:
    path = write(tmp_path / "model") / "model.safetensors"
    assert digests.digest(path).startswith(f"{new_hasher()[0]}:")
