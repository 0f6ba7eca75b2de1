"""Named shapes: published parameter counts, changes by field, and checks when made."""

import math

import pytest

from minidist.model.configs import config
from tests.helpers.refusals import refuses


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-small", 124_439_808),
        ("bert-base", 109_482_240),
        ("bert-large", 335_141_888),
        ("bert-tiny", 4_385_920),
        ("bert-mini", 11_170_560),
        ("bert-small", 28_763_648),
        ("bert-medium", 41_373_184),
    ],
)
def test_named_sizes_have_their_published_parameters(name, parameters):
    assert config(name).parameters() == parameters


def test_unknown_names_and_fields_offer_the_nearest():
    with pytest.raises(ValueError, match="unknown model 'gpt2-smal': did you mean 'gpt2-small'"):
        config("gpt2-smal")
    with pytest.raises(ValueError, match="unknown field of byte-tiny 'layer': did you mean 'layers'"):
        config("byte-tiny", layer=3)
    assert config("gpt2-small", layers=2).layers == 2
    assert config("gpt2-small").layers == 12


test_a_shape_validates_itself = refuses(
    lambda **changes: config("byte-tiny", **changes),
    ({"heads": 3}, r"heads \(3\) must divide width \(64\)"),
    ({"layers": 0}, "layers is 0; give at least 1"),
    ({"width": 64.0}, TypeError, r"width is 64\.0 \(float\); give an integer"),
    ({"dropout": 1.0}, r"dropout is 1\.0"),
    ({"dropout": math.nan}, "dropout is nan"),
    ({"balance_rate": 0.1}, r"balance_rate is 0\.1, but there are no experts"),
)
