"""What Python believes of csrc/phistate.h, against what a compiler makes of it."""

import ctypes
import shutil
import subprocess
from ctypes import Structure
from pathlib import Path

import pytest

from phistate.ops.backends import abi

HEADER = Path(__file__).parents[1] / "csrc" / "phistate.h"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
CONSTANTS = {
    "PHISTATE_ABI": abi.VERSION,
    "PHISTATE_SEGMENT": abi.SEGMENT,
    "PHISTATE_SELECTIVE_SEGMENT": abi.SELECTIVE_SEGMENT,
    **dict(zip(("PHISTATE_F32", "PHISTATE_BF16", "PHISTATE_F16"), abi.DTYPES.values(), strict=True)),
    **dict(zip(("PHISTATE_MAP_NONE", "PHISTATE_MAP_ELU", "PHISTATE_MAP_RELU"), abi.MAPS.values(), strict=True)),
    # A decay's kind is its rank less one, for a decay per head one more (linear_attention.py).
    "PHISTATE_DECAY_NONE": 0,
    "PHISTATE_DECAY_HEAD": 1,
    "PHISTATE_DECAY_SCALAR": 2,
    "PHISTATE_DECAY_VECTOR": 3,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Sizes, offsets and constants by name, as the compiler has them."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    asked = dict.fromkeys(CONSTANTS)
    for name, structure in abi.STRUCTURES.items():
        asked[f"sizeof({name})"] = asked[f"alignof({name})"] = None
        for field, *_ in structure._fields_:
            asked[f"offsetof({name}, {field})"] = asked[f"sizeof({name}::{field})"] = None
    lines = "".join(f'    printf("%ld\\n", (long)({expression}));\n' for expression in asked)
    folder = tmp_path_factory.mktemp("abi")
    source = folder / "abi.cpp"
    source.write_text(f'#include <stddef.h>\n#include <stdio.h>\n#include "{HEADER}"\nint main() {{\n{lines}}}\n')
    subprocess.run([COMPILER, "-std=c++20", str(source), "-o", str(folder / "abi")], check=True)
    printed = subprocess.run([str(folder / "abi")], check=True, capture_output=True, text=True).stdout.split()
    return dict(zip(asked, map(int, printed), strict=True))


@pytest.mark.parametrize("name", abi.STRUCTURES)
def test_structures(compiled, name):
    structure = abi.STRUCTURES[name]
    assert ctypes.sizeof(structure) == compiled[f"sizeof({name})"]
    for field, kind, *_ in structure._fields_:
        assert getattr(structure, field).offset == compiled[f"offsetof({name}, {field})"], field
        assert ctypes.sizeof(kind) == compiled[f"sizeof({name}::{field})"], field


def test_no_field_is_left_out(compiled):
    """All fields are 8 bytes: where offsets and sizes agree, so do counts. So no structure may be missing."""
    declared = {line.split()[2] for line in HEADER.read_text().splitlines() if line.startswith("typedef struct")}
    assert declared == set(abi.STRUCTURES)


def test_constants(compiled):
    assert {name: compiled[name] for name in CONSTANTS} == CONSTANTS


def test_form_puts_values_where_their_names_say():
    packed = abi.form(abi.ConvStep, "bytes kept silu y weight s").pack(208, 3, 1, *range(10, 16), 99, *range(20, 26))
    got = abi.ConvStep.from_buffer_copy(packed)
    assert (got.bytes, got.batch, got.kept, got.silu) == (208, 0, 3, 1)
    assert [getattr(got.y, name) for name, *_ in abi.Series._fields_] == list(range(10, 16))
    assert got.x.data is None
    assert got.weight == 99
    assert got.s.dtype == 25
    doubles = abi.form(abi.LinearAttention, "scale map_scale").pack(0.5, 2.0)
    assert abi.LinearAttention.from_buffer_copy(doubles).scale == 0.5
    assert abi.LinearAttention.from_buffer_copy(doubles).map_scale == 2.0


@pytest.mark.parametrize("names", ["bytes width kept", "kept bytes", "bytes bytes", "bytes wide"])
def test_form_takes_fields_in_their_order(names):
    with pytest.raises(ValueError, match="takes fields of ConvStep in its order"):
        abi.form(abi.ConvStep, names.replace("bytes width", "width bytes"))


def test_every_structure_packs_whole():
    for structure in abi.STRUCTURES.values():
        names = " ".join(name for name, *_ in structure._fields_)
        assert abi.form(structure, names).size == ctypes.sizeof(structure)
        assert issubclass(structure, Structure)
