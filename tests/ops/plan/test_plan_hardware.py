"""Hardware files: the shipped ones, custom ones, and invalid ones."""

import pytest
from support.expected_errors import raises

from megarl.config.problems import InvalidConfigError
from megarl.ops.plan.hardware import FOLDER, known_hardware, read_hardware


def custom_file(tmp_path, change):
    text = (FOLDER / "h100.yaml").read_text(encoding="utf-8")
    file = tmp_path / "custom.yaml"
    file.write_text(change(text), encoding="utf-8")
    return str(file)


def test_shipped_files_are_valid_and_named_by_their_file():
    assert {"a100", "h100", "h200", "b200", "cpu"} <= set(known_hardware())
    for name in known_hardware():
        hardware = read_hardware(name)
        assert hardware.name == name and hardware.device == ("cpu" if name == "cpu" else "cuda")


def test_peaks_equal_the_data_sheets():
    a100, h100, h200 = (read_hardware(name) for name in ("a100", "h100", "h200"))
    assert (a100.peak_flops("bfloat16"), h100.peak_flops("bfloat16")) == (312e12, 989e12)
    assert h200.peak == h100.peak and h200.memory_bandwidth == 4800


def test_costs_are_bytes_over_bandwidth():
    h100 = read_hardware("h100")
    assert h100.transfer_s(50e9, within_node=False) == pytest.approx(1.0)
    assert h100.transfer_s(450e9, within_node=True) == pytest.approx(1.0)
    assert h100.compute_s(989e12, "bfloat16") == pytest.approx(1.0)


def test_custom_file(tmp_path):
    assert read_hardware(custom_file(tmp_path, lambda t: t.replace("name: h100", "name: mine"))).name == "mine"


def test_an_unknown_name_suggests_the_nearest():
    with raises("plan.no-hardware-file", "--hardware=h1000", "h1000.yaml", " h100?", "a100"):
        read_hardware("h1000")


@pytest.mark.parametrize(
    ("change", "code", "path"),
    [
        (lambda t: t.replace("layer_us:", "layers_us:"), "config.unknown-key", "latency.layers_us"),
        (lambda t: t.replace("  network: 50 ", "  network: -1 "), "config.value-out-of-limits", "links.network"),
        (lambda t: t.replace("  bfloat16: 989", "  bfloat16: fast"), "config.wrong-type", "peak.bfloat16"),
        (lambda t: t.replace("memory_bandwidth: 3352\n", ""), "config.required-key", "memory_bandwidth"),
    ],
)
def test_invalid_fields_are_named(tmp_path, change, code, path):
    with pytest.raises(InvalidConfigError) as caught:
        read_hardware(custom_file(tmp_path, change))
    assert (f"custom.yaml: {path}", code) in {(problem.path, problem.code) for problem in caught.value.problems}


@pytest.mark.parametrize(("text", "code"), [("- 1\n", "plan.hardware-no-fields"), ("a: [", "plan.hardware-not-yaml")])
def test_other_files_are_rejected(tmp_path, text, code):
    with raises(code, "custom.yaml"):
        read_hardware(custom_file(tmp_path, lambda _: text))
