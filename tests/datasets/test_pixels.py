"""Pixels of any form: the same pixels, or one sentence."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from torchcaps.datasets.pixels import channels_first, fit_shape, prepare_images, scale_pixels, to_bytes
from torchcaps.errors import InputError, WrongType

BYTES = np.random.default_rng(0).integers(0, 256, (5, 1, 6, 7), dtype=np.uint8)
FORMS: dict[str, Any] = {
    "tensor": torch.from_numpy(BYTES),
    "list of arrays": list(BYTES),
    "list of tensors": list(torch.from_numpy(BYTES)),
    "nested lists": BYTES.tolist(),
    "objects": np.array([*BYTES, None], dtype=object)[:-1],
    "int64": BYTES.astype(np.int64),
    "big-endian": BYTES.astype(">i4"),
    "Fortran": np.asfortranarray(BYTES),
    "read-only": np.broadcast_to(BYTES, BYTES.shape),
    "negative strides": BYTES[::-1].copy()[::-1],
    "uint16": BYTES.astype(np.uint16) * 257,
    "uint64": BYTES.astype(np.uint64),
    "float16": (BYTES / 255).astype(np.float16),
    "bfloat16": torch.from_numpy(BYTES / 255).bfloat16(),
    "float64": BYTES / 255,
    "float64, a rounding error beyond": BYTES / 255 + 1e-7,
    "needs a gradient": torch.from_numpy(BYTES / 255).requires_grad_(),
    "Pillow": [Image.fromarray(each[0]) for each in BYTES],
    "Pillow, RGB": [Image.fromarray(each[0]).convert("RGB") for each in BYTES],
    "Pillow, palette": [Image.fromarray(each[0]).convert("P") for each in BYTES],
    "no channel": BYTES[:, 0],
    "channels last": BYTES.transpose(0, 2, 3, 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_pixels_of_any_form_are_the_same(form: str) -> None:
    pixels = to_bytes(prepare_images(FORMS[form], (1, 6, 7)))
    assert pixels.is_contiguous()
    assert not pixels.requires_grad
    off = (pixels.int() - torch.from_numpy(BYTES).int()).abs().max()
    assert off <= (form == "bfloat16"), "bfloat16 holds 8 bits"


WRONG: dict[str, tuple[Any, str]] = {
    "float 0..255": (BYTES.astype(np.float32), "such as scale=(0, 255)"),
    "float -1..1": (BYTES / 127.5 - 1, "such as scale=(-1, 1)"),
    "Hounsfield": (BYTES.astype(np.int16) * 16 - 1000, "such as scale=(-1024, 3071)"),
    "12 bit": (BYTES.astype(np.uint16) * 16, "such as scale=(0, 4095)"),
    "8 bit in 16": (BYTES.astype(np.uint16), "such as scale=(0, 255)"),
    "int64 beyond": (BYTES.astype(np.int64) * 2**40, "got int64 from 0"),
    "NaN": (np.full_like(BYTES, np.nan, dtype=float), "images must be finite"),
    "infinite": (np.full_like(BYTES, np.inf, dtype=float), "images must be finite"),
    "texts": (np.full(5, "x"), "images must be numbers, got an array of <U1"),
    "dates": (np.zeros((5, 6, 7), "datetime64[s]"), "images must be numbers"),
    "complex": (BYTES.astype(complex), "images must be numbers"),
    "complex tensor": (torch.zeros(5, 1, 6, 7, dtype=torch.complex64), "a dense tensor of real numbers"),
    "sparse": (torch.zeros(5, 42).to_sparse(), "a dense tensor of real numbers"),
    "meta": (torch.zeros(5, 1, 6, 7, device="meta"), "a dense tensor of real numbers, got a meta tensor"),
    "a set": ({1, 2}, "got a value of type set"),
    "None": (None, "got None"),
    "a text": ("mnist", "got a value of type str"),
    "several sizes": ([BYTES[0], BYTES[0, :, 1:]], "must have one size, got several, such as (1, 5, 7) and (1, 6, 7)"),
    "lists of several lengths": ([[1, 2], [1]], "must have one size"),
    "list of None": ([None, None], "images must be numbers"),
    "another shape": (BYTES[..., :5], "must have the shape (N, 1, 6, 7)"),
    "rows": (BYTES.reshape(5, -1), "such as images.reshape(-1, 1, 6, 7)"),
}


@pytest.mark.parametrize("form", WRONG)
def test_what_no_pixels_are_is_said_in_a_sentence(form: str) -> None:
    values, said = WRONG[form]
    with pytest.raises(InputError) as caught:
        prepare_images(values, (1, 6, 7))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@settings(max_examples=60, deadline=None)
@given(
    arrays(
        st.sampled_from((np.uint16, np.int16, np.int32, np.float32, np.float64)),
        (2, 3, 4),
        elements=st.integers(0, 4095),
    ),
    st.integers(-1000, 0),
    st.integers(1, 5000),
)
def test_a_scale_is_linear_and_clips_whatever_the_dtype(values: np.ndarray, low: int, high: int) -> None:
    expected = ((values.astype(np.float64) - low) / (high - low)).clip(0, 1)
    for given_values in (values, torch.from_numpy(values), values.tolist()):
        made = scale_pixels(given_values, (low, high))
        assert made.dtype == torch.float32
        assert torch.equal(made, torch.from_numpy(expected).float())


@pytest.mark.parametrize(
    "scale", [(1, 0), (0, 0), (0,), (0, float("nan")), (0, float("inf")), "12bit", None, 5, ("0", "1")]
)
def test_scales_that_cannot_be(scale: Any) -> None:
    with pytest.raises(InputError, match='scale must be "auto", "none", or two numbers'):
        scale_pixels(BYTES, scale)


def test_none_keeps_the_values() -> None:
    values = torch.randn(5, 1, 6, 7, dtype=torch.float64)
    assert torch.equal(prepare_images(values, (1, 6, 7), "none"), values.float())
    assert torch.equal(scale_pixels(BYTES, "none"), torch.from_numpy(BYTES).float())


def test_a_network_of_height_1_takes_sequences_as_they_are() -> None:
    values = torch.randn(5, 3, 20) * 100
    values[0, :, 12:] = torch.nan
    for form in (values, values[:, :, None], values.double().numpy(), values[:, :, None].movedim(1, 3)):
        made = prepare_images(form, (3, 1, 20))
        assert torch.equal(made.nan_to_num(-1), values[:, :, None].nan_to_num(-1))
    assert prepare_images(values[:, 0], (1, 1, 20)).shape == (5, 1, 1, 20)


def test_the_order_of_channels_is_told_where_the_shape_does_not_tell_it() -> None:
    assert channels_first(torch.zeros(60, 20, 30, 3)).shape == (60, 3, 20, 30)
    assert channels_first(torch.zeros(60, 3, 20, 30)).shape == (60, 3, 20, 30)
    for shape in ((60, 1, 20, 3), (60, 4, 3, 3), (60, 9, 20, 9)):
        with pytest.raises(InputError, match='say which one by channels, "first" or "last"'):
            channels_first(torch.zeros(shape))
        assert channels_first(torch.zeros(shape), order="first").shape == shape
        assert channels_first(torch.zeros(shape), order="last").shape == (60, shape[3], *shape[1:3])
        assert fit_shape(torch.zeros(shape), shape[1:]).shape == shape  # type: ignore[arg-type]
    with pytest.raises(WrongType, match="pictures must be"):
        scale_pixels(None, where="pictures")
