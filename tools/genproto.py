"""Generate the Python stubs of the API from its protos: `python -m tools.genproto [--check]`.

The stubs are committed, so installing the package needs no compiler. grpcio-tools 1.71.2 makes them,
because what it makes loads on every grpcio and protobuf from there up. mypy-protobuf types the messages and
the calls, but needs a newer protobuf, so the two live in two environments of their own under .tools/.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "proto"
STUBS = PROTOS / "gen"
PACKAGE = Path("kvcache/v1")
ENVIRONMENTS = ROOT / ".tools"

# The lowest grpcio and protobuf that the package allows: --check imports the stubs on them.
PROTOC_PINS = ("grpcio-tools==1.71.2", "grpcio==1.71.2", "protobuf==5.29.1", "setuptools==80.9.0")
PLUGIN_PINS = ("mypy-protobuf==5.1.0", "protobuf==6.33.6", "types-protobuf==7.35.1.20260906")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.genproto", description="Generate the stubs of the API.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the committed stubs are stale")
    is_check = parser.parse_args(arguments).check
    with tempfile.TemporaryDirectory(prefix="genproto-") as directory:
        fresh = Path(directory)
        generate(PROTOS, fresh)
        if is_check:
            return _report(fresh)
        for path in replace_tree(fresh / PACKAGE.parts[0], STUBS / PACKAGE.parts[0]):
            print(path.relative_to(ROOT))
    return 0


def generate(protos: Path, target: Path) -> None:
    """Write the stubs of every proto of the package below ``target``, as an importable package."""
    sources = sorted((protos / PACKAGE).glob("*.proto"))
    if not sources:
        raise SystemExit(f"no .proto file in {protos / PACKAGE}")
    plugins = _environment("mypy-protobuf", PLUGIN_PINS).parent
    run_environment(
        "grpcio-tools",
        PROTOC_PINS,
        "-m",
        "grpc_tools.protoc",
        f"--proto_path={protos}",
        f"--python_out={target}",
        f"--grpc_python_out={target}",
        f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
        f"--mypy_out=quiet:{target}",
        f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
        f"--mypy_grpc_out=quiet:{target}",
        *(str(source) for source in sources),
    )
    for source in sources:
        if not re.search(r"^\s*service\s+\w+", source.read_text(), re.MULTILINE):
            for suffix in ("py", "pyi"):
                (target / PACKAGE / f"{source.stem}_pb2_grpc.{suffix}").unlink(missing_ok=True)
    for package in (PACKAGE, *PACKAGE.parents[:-1]):
        (target / package / "__init__.py").touch()
    (target / PACKAGE.parts[0] / "py.typed").touch()


def replace_tree(fresh: Path, committed: Path) -> Iterator[Path]:
    """Make ``committed`` hold the files of ``fresh`` and no others; yields the paths that changed."""
    for name in sorted({*_list_files(fresh), *_list_files(committed)}):
        wanted, present = fresh / name, committed / name
        if not wanted.exists():
            present.unlink()
        elif present.exists() and present.read_bytes() == wanted.read_bytes():
            continue
        else:
            present.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(wanted, present)
        yield present


def list_differences(fresh: Path, committed: Path) -> Iterator[str]:
    """A diff that would turn ``committed`` into ``fresh``; no line where they hold the same files."""
    for name in sorted({*_list_files(fresh), *_list_files(committed)}):
        wanted, present = fresh / name, committed / name
        if not present.exists():
            yield f"missing: {name}\n"
        elif not wanted.exists():
            yield f"no proto makes it: {name}\n"
        else:
            before, after = (path.read_text().splitlines(keepends=True) for path in (present, wanted))
            yield from difflib.unified_diff(before, after, f"committed/{name}", f"fresh/{name}")


def _report(fresh: Path) -> int:
    differences = list(list_differences(fresh / PACKAGE.parts[0], STUBS / PACKAGE.parts[0]))
    if differences:
        sys.stdout.writelines(differences)
        print("The stubs in proto/gen are stale: run make proto", file=sys.stderr)
        return 1
    modules = [".".join((*PACKAGE.parts, path.stem)) for path in sorted((fresh / PACKAGE).glob("*_pb2*.py"))]
    imports = f"import sys; sys.path.insert(0, {str(fresh)!r}); import {', '.join(modules)}"
    run_environment("grpcio-tools", PROTOC_PINS, "-W", "error", "-c", imports)
    print(f"stubs are fresh; {len(modules)} modules import on {PROTOC_PINS[1]} and {PROTOC_PINS[2]}")
    return 0


def run_environment(name: str, pins: Iterable[str], *arguments: str) -> None:
    """Run the Python of an environment of its own. Raises SystemExit when that fails."""
    _run(_environment(name, pins), *arguments)


def _environment(name: str, pins: Iterable[str]) -> Path:
    """The Python of a virtual environment that holds ``pins``, made on first use and whenever they change."""
    directory = ENVIRONMENTS / name
    python, note = directory / "bin" / "python", directory / "pins"
    text = "\n".join(pins)
    if not note.exists() or note.read_text() != text:
        _run(Path(sys.executable), "-m", "venv", "--clear", str(directory))
        _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *text.splitlines())
        note.write_text(text)
    return python


def _list_files(directory: Path) -> set[str]:
    if not directory.exists():
        return set()
    found = (path for path in directory.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(directory)) for path in found}


def _run(python: Path, *arguments: str) -> None:
    try:
        subprocess.run([str(python), *arguments], check=True, cwd=ROOT)
    except subprocess.CalledProcessError as failure:
        raise SystemExit(f"{' '.join(arguments[:3])} ended with {failure.returncode}") from failure


if __name__ == "__main__":
    sys.exit(main())
