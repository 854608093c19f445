"""Every kernel compiles for every architecture that we promise, on a machine without a GPU too."""

from __future__ import annotations

import pytest

from gpu_ops.kernels.launch import KERNELS, KernelRejected, compile_file, compile_source, kernel_files
from tests.style.tree import ROOT, list_files

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
ELF = b"\x7fELF"
SOURCES = [name for name in list_files() if name.endswith(".cu")]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", SOURCES)
def test_every_kernel_compiles(name: str, architecture: str) -> None:
    assert compile_file(ROOT / name, architecture).startswith(ELF)


def test_the_kernels_of_the_package_are_found() -> None:
    found = [str(path.relative_to(ROOT)) for path in kernel_files(KERNELS)]
    assert "gpu_ops/kernels/pages.cu" in found
    assert found == [name for name in SOURCES if name.startswith("gpu_ops/kernels/")]


def test_a_broken_kernel_is_refused_with_the_compilers_words() -> None:
    source = 'extern "C" __global__ void broken(int* x) {\n    *x = nothing;\n}\n'
    with pytest.raises(KernelRejected) as refused:
        compile_source(source, "broken.cu", "sm_90")
    assert (refused.value.source, refused.value.architecture) == ("broken.cu", "sm_90")
    assert 'broken.cu(2): error: identifier "nothing" is undefined' in refused.value.log


def test_an_architecture_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(KernelRejected, match="sm_1"):
        compile_source("", "empty.cu", "sm_1")


def test_headers_of_the_toolkit_and_of_the_source_are_there() -> None:
    source = (
        '#include <cuda_fp16.h>\n#include <cuda_fp8.h>\nextern "C" __global__ void f(half* x) { *x = half(1.f); }\n'
    )
    assert compile_source(source, "half.cu", "sm_80").startswith(ELF)
