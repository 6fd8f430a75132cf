"""Pipeline errors list every valid value."""

import pytest
from support.expected_errors import raises

from megarl.models import ParallelLayout
from megarl.models.layout import check_pipeline, fits_pipeline

PP, VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


@pytest.mark.parametrize(
    ("layers", "sizes", "key", "valid"),
    [
        (24, {"pp": 5}, f"{PP}=5", "1, 2, 3, 4, 6, 8, 12, 24"),
        (2, {"pp": 4}, f"{PP}=4", "1, 2"),
        (24, {"pp": 4, "embedding_as_layer": True}, f"{PP}=4", "1, 5, 25"),
        (24, {"pp": 2, "vpp": 5}, f"{VPP}=5", "1, 2, 3, 4, 6, 12"),
        (24, {"vpp": 2}, f"{VPP}=2", "1"),
        (6, {"pp": 3, "first_stage_layers": 1}, f"{FIRST}=1", "null, 2, 4"),
        (6, {"pp": 2, "first_stage_layers": 1, "last_stage_layers": 2}, f"{FIRST}=1", "null, 4"),
        (6, {"pp": 3, "last_stage_layers": 6}, f"{LAST}=6", "null, 2, 4"),
        (6, {"pp": 3, "last_stage_layers": 4, "vpp": 3}, f"{VPP}=3", "1"),
    ],
)
def test_layers_that_do_not_divide_are_rejected(layers, sizes, key, valid):
    layout = ParallelLayout(**sizes)
    code = "layout.pp-layers" if key.startswith(PP) else "layout.pipeline-split"
    with raises(code, f"critic.megatron.{key}") as error:
        check_pipeline(layers, layout, "critic.megatron")
    assert error.value.text.endswith(f"valid for this model: {valid}")


@pytest.mark.parametrize("layers", [1, 2, 6, 7, 12])
def test_accepted_layouts_place_every_layer_once(layers):
    accepted = 0
    for pp in range(1, 6):
        for vpp in range(1, 4):
            for first in (None, 1, 3):
                for last in (None, 2):
                    for ends in (False, True):
                        layout = ParallelLayout(
                            pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last,
                            embedding_as_layer=ends, loss_as_layer=ends,
                        )  # fmt: skip
                        if not fits_pipeline(layers, layout):
                            continue
                        accepted += 1
                        chunks = [layout.layers(layers, stage, chunk) for chunk in range(vpp) for stage in range(pp)]
                        assert [layer for chunk in chunks for layer in chunk] == list(range(layers))
                        assert all(len(chunk) for chunk in chunks[1:-1])
                        check_pipeline(layers, layout, "")
    assert accepted
