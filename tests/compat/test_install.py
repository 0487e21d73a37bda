"""install(): what stands where, what is left alone, and that an undo leaves nothing behind."""

import importlib
import importlib.util
import subprocess
import sys
import types
from unittest import mock

import pytest
import torch

from phistate import compat
from phistate.compat import causal_conv1d, mamba_ssm
from phistate.compat import install as install_function
from phistate.compat import package as packages
from phistate.compat.package import Package
from phistate.compat.report import Entry

installing = sys.modules["phistate.compat.install"]
NAMES = ("mamba_ssm", "causal_conv1d")


def standing():
    return {
        path: module for path, module in sys.modules.items() if path.partition(".")[0] in (*NAMES, "somebody", "other")
    }


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch):
    for path in standing():
        monkeypatch.delitem(sys.modules, path)
    monkeypatch.setattr(installing, "_WARNED", set())
    yield
    assert not installing._STANDING
    assert not +packages._PATCHED
    for path in standing():
        del sys.modules[path]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Writes packages that are then installed: ``site({"mamba_ssm/__init__.py": source})``."""

    def write(files):
        for path, source in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(source)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path)
    return write


HEAVY = ("transformers", "huggingface_hub", "fla", "triton", "einops", "mamba_ssm", "causal_conv1d", "sklearn")


@pytest.mark.parametrize(
    "code, loaded",
    [
        ("import phistate.compat", set()),
        ("import phistate.compat; phistate.compat.install('mamba_ssm', 'causal_conv1d')", {*NAMES, "torch"}),
    ],
)
def test_what_an_import_loads(code, loaded):
    check = f"{code}; import sys; print(*[name for name in ('torch', *{HEAVY}) if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert set(out.stdout.split()) == loaded


def test_the_function_is_not_hidden_by_its_module():
    importlib.import_module("phistate.compat.install")
    assert compat.install is install_function
    assert callable(compat.install)


@pytest.mark.parametrize(
    "names, message",
    [
        ((), "names: got none; takes one or more of 'causal_conv1d', 'mamba_ssm', 'fla'"),
        (("mamba_ssm", "mamba"), "names: got 'mamba'; takes 'causal_conv1d', 'mamba_ssm', 'fla'"),
    ],
)
def test_names_are_known(names, message):
    with pytest.raises(ValueError, match=message):
        compat.install(*names)
    assert not standing()


@pytest.mark.parametrize("package", [mamba_ssm.PACKAGE, causal_conv1d.PACKAGE], ids=lambda p: p.name)
def test_every_name_is_where_people_import_it_from(package):
    with compat.install(package.name) as report:
        for path, names in package.table.items():
            module = importlib.import_module(path)
            spec = importlib.util.find_spec(path)
            assert spec.name == path
            assert module.__version__ == package.versions[-1]
            for name, value in names.items():
                space = {}
                exec(f"from {path} import {name}\nimport {path}\nby_path = {path}.{name}", space)
                assert space[name] is space["by_path"] is value
                assert any((entry.where, entry.name) == (path, name) for entry in report.replaced)
        assert report.replaced[0] == Entry(package.name, "-", f"stand-ins for {package.versions[-1]}: not installed")
        assert f"{package.name}: {len(report.replaced)} replaced, 0 left" in str(report)
    assert not standing()


def test_what_a_stand_in_lacks_is_an_import_error():
    with compat.install("mamba_ssm"):
        import mamba_ssm

        with pytest.raises(ImportError, match="cannot import name 'Mamba3' from 'mamba_ssm'.*phistate"):
            from mamba_ssm import Mamba3  # noqa: F401
        with pytest.raises(ModuleNotFoundError, match="No module named 'mamba_ssm.modules.mamba3'"):
            import mamba_ssm.modules.mamba3
        with pytest.raises(
            AttributeError, match="phistate's stand-in for mamba_ssm has no 'Mamba3'; it has Mamba, Mamba2"
        ):
            _ = mamba_ssm.Mamba3
        assert getattr(mamba_ssm, "Mamba3", None) is None


def test_calls_that_share_stand_ins_undo_in_any_order():
    first = compat.install("mamba_ssm")
    module = sys.modules["mamba_ssm"]
    second = compat.install("causal_conv1d", "mamba_ssm", "mamba_ssm")
    assert sys.modules["mamba_ssm"] is module
    assert second.replaced[-1].where == "mamba_ssm.utils.generation"
    first.undo()
    first.undo()
    assert sys.modules["mamba_ssm"] is module
    with compat.install("mamba_ssm"):
        second.undo()
        assert "causal_conv1d" not in sys.modules
        assert sys.modules["mamba_ssm"] is module
    assert not standing()
    with compat.install("mamba_ssm"):
        assert sys.modules["mamba_ssm"] is not module


def test_a_report_whose_stand_ins_were_swept_away_undoes_itself_alone():
    with mock.patch.dict(sys.modules):
        first = compat.install("mamba_ssm")
    second = compat.install("mamba_ssm")
    first.undo()
    third = compat.install("mamba_ssm")
    second.undo()
    assert isinstance(sys.modules["mamba_ssm"], types.ModuleType)
    third.undo()
    assert "mamba_ssm" not in sys.modules


def test_packages_are_made_in_the_order_in_which_they_import_each_other(site):
    looks = "try:\n    from causal_conv1d import causal_conv1d_fn as held\nexcept ImportError:\n    held = None\n"
    site({"mamba_ssm/__init__.py": f"__version__ = '2.3.2.post1'\n{looks}"})
    with compat.install("mamba_ssm", "causal_conv1d"):
        import mamba_ssm

        assert mamba_ssm.held is causal_conv1d.causal_conv1d_fn


def test_what_was_there_comes_back():
    mock, below = types.ModuleType("mamba_ssm"), types.ModuleType("mamba_ssm.mock")
    sys.modules |= {"mamba_ssm": mock, "mamba_ssm.mock": below, "causal_conv1d": None}
    with compat.install(*NAMES):
        from causal_conv1d import causal_conv1d_fn
        from mamba_ssm import Mamba

        assert Mamba is mamba_ssm.Mamba
        assert causal_conv1d_fn is causal_conv1d.causal_conv1d_fn
        assert "mamba_ssm.mock" not in sys.modules
    assert standing() == {"mamba_ssm": mock, "mamba_ssm.mock": below, "causal_conv1d": None}


def test_who_comes_later_keeps_the_place():
    later = types.ModuleType("mamba_ssm")
    with compat.install("mamba_ssm"):
        sys.modules["mamba_ssm"] = later
    assert standing() == {"mamba_ssm": later}


def test_an_import_that_fails_is_replaced_and_told(site):
    site(
        {
            "mamba_ssm/__init__.py": "from mamba_ssm import utils\nimport selective_scan_cuda",
            "mamba_ssm/utils.py": "",
        }
    )
    with compat.install("mamba_ssm") as report:
        from mamba_ssm import Mamba

        assert Mamba is mamba_ssm.Mamba
        assert "mamba_ssm.utils" in sys.modules
        assert sys.modules["mamba_ssm.utils"].__file__ == mamba_ssm.__file__
        assert report.replaced[0].what.endswith(
            "installed, but cannot be imported here (ModuleNotFoundError: No module named 'selective_scan_cuda')"
        )
    assert not standing()
    with pytest.raises(ModuleNotFoundError, match="selective_scan_cuda"):
        importlib.import_module("mamba_ssm")


WORKS = """
__version__ = "1.0"

def causal_conv1d_fn(x, weight):
    return x
"""


def test_an_installed_package_that_serves_the_cpu_is_left_alone(site):
    site({"causal_conv1d.py": WORKS})
    import causal_conv1d as installed

    before = dict(vars(installed))
    with compat.install("causal_conv1d") as report:
        assert vars(installed) == before
        assert report.replaced == []
        assert report.left == [Entry("causal_conv1d", "-", "1.0 is installed and serves CPU tensors itself")]
    assert vars(installed) == before


FAILS = {
    "causal_conv1d/__init__.py": """
__version__ = "{version}"
from causal_conv1d.causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update
""",
    "causal_conv1d/causal_conv1d_interface.py": """
def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
                     final_states_out=None, activation=None):
    if x.is_cpu:
        raise RuntimeError("Expected x.is_cuda() to be true")
    return "theirs"

def causal_conv1d_update(x, conv_state, weight, bias=None):
    raise RuntimeError("Expected x.is_cuda() to be true")

causal_conv1d_ref = None
""",
    "somebody/model.py": "from causal_conv1d import causal_conv1d_fn as conv",
}


def installed_that_fails(site, version="1.7.0"):
    site({path: source.replace("{version}", version) for path, source in FAILS.items()})
    return importlib.import_module("causal_conv1d"), importlib.import_module("somebody.model")


def test_functions_of_an_installed_package_that_fails_are_replaced_for_the_cpu(site):
    installed, user = installed_that_fails(site)
    original, update = installed.causal_conv1d_fn, installed.causal_conv1d_update
    x, weight = torch.randn(1, 2, 5), torch.randn(2, 3)
    with compat.install("causal_conv1d") as report:
        interface = sys.modules["causal_conv1d.causal_conv1d_interface"]
        for function in (installed.causal_conv1d_fn, interface.causal_conv1d_fn, user.conv):
            assert torch.equal(function(x, weight), causal_conv1d.causal_conv1d_fn(x, weight))
            assert function(x.to("meta"), weight) == "theirs"
        assert {(entry.where, entry.name) for entry in report.replaced} == {
            ("causal_conv1d", "causal_conv1d_fn"),
            ("causal_conv1d.causal_conv1d_interface", "causal_conv1d_fn"),
            ("somebody.model", "conv"),
        }
        assert installed.causal_conv1d_update is update
        left = {(entry.where, entry.name): entry.what for entry in report.left}
        assert "takes (x, conv_state, weight, bias=None); phistate knows (x, conv_state" in left.pop(
            ("causal_conv1d", "causal_conv1d_update")
        )
        assert left["causal_conv1d.causal_conv1d_interface", "causal_conv1d_ref"] == "is not in the installed version"
        assert "cannot be imported: ModuleNotFoundError" in left["causal_conv1d.causal_conv1d_varlen", "-"]
    assert installed.causal_conv1d_fn is interface.causal_conv1d_fn is user.conv is original


def test_calls_that_share_replaced_functions_undo_in_any_order(site):
    installed, _ = installed_that_fails(site)
    original = installed.causal_conv1d_fn
    first = compat.install("causal_conv1d")
    replaced = installed.causal_conv1d_fn
    second = compat.install("causal_conv1d")
    assert [entry.name for entry in first.replaced] == [entry.name for entry in second.replaced]
    assert installed.causal_conv1d_fn is replaced
    first.undo()
    assert installed.causal_conv1d_fn is replaced
    second.undo()
    assert installed.causal_conv1d_fn is original


def test_a_version_never_checked_is_warned_about_once(site):
    installed_that_fails(site, "99.0")
    with pytest.warns(UserWarning, match="causal_conv1d 99.0 was never checked.*knows 1.7.0") as caught:
        compat.install("causal_conv1d").undo()
    assert caught[0].filename == __file__
    compat.install("causal_conv1d").undo()


SCAN = """
def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
                      return_last_state=False):
    raise RuntimeError("Expected u.is_cuda() to be true, but got false.")
"""


def test_layers_of_an_installed_mamba_ssm_call_what_was_replaced(site):
    site(
        {
            "mamba_ssm/__init__.py": "__version__ = '2.3.2.post1'\nfrom mamba_ssm.modules.mamba_simple import Mamba",
            "mamba_ssm/ops/selective_scan_interface.py": SCAN,
            "mamba_ssm/modules/mamba_simple.py": """
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

class Mamba:
    def forward(self, *inputs):
        return selective_scan_fn(*inputs)
""",
        }
    )
    inputs = torch.randn(1, 2, 5), torch.rand(1, 2, 5), -torch.rand(2, 3), torch.randn(1, 3, 5), torch.randn(1, 3, 5)
    with compat.install("mamba_ssm"):
        from mamba_ssm import Mamba

        scan = mamba_ssm.PACKAGE.table["mamba_ssm"]["selective_scan_fn"]
        assert torch.equal(Mamba().forward(*inputs), scan(*inputs))
    with pytest.raises(RuntimeError, match="is_cuda"):
        Mamba().forward(*inputs)


def test_a_package_patches_itself_where_it_says_so(site, monkeypatch):
    site({"other/__init__.py": "__version__ = '2'"})
    done = []

    def fails():
        raise RuntimeError("0 active drivers")

    def patch(report):
        done.append("patched")
        report._undo.append(lambda: done.append("undone"))

    package = Package("other", ("2",), {"other": {}}, __file__, fails, patch)
    here = types.ModuleType("described")
    here.PACKAGE = package
    monkeypatch.setitem(sys.modules, "described", here)
    monkeypatch.setitem(installing._PACKAGES, "other", "described")
    with compat.install("other"):
        assert done == ["patched"]
    assert done == ["patched", "undone"]

    def breaks(report):
        patch(report)
        raise RuntimeError("halfway")

    here.PACKAGE = Package("other", ("2",), {"other": {}}, __file__, fails, breaks)
    with pytest.raises(RuntimeError, match="halfway"):
        compat.install("mamba_ssm", "other")
    assert done[2:] == ["patched", "undone"]
    assert set(standing()) == {"other"}


def test_a_description_that_is_missing_undoes_the_others(monkeypatch):
    monkeypatch.setitem(installing._PACKAGES, "other", "phistate.compat.nowhere")
    with pytest.raises(ModuleNotFoundError, match="phistate.compat.nowhere"):
        compat.install("causal_conv1d", "mamba_ssm", "other")
    assert not standing()
