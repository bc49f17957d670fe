from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from torchcaps.analysis import load_image, predict
from torchcaps.errors import InputError

GREY, COLOUR = (1, 28, 28), (3, 28, 28)


def corner(size=(56, 56)) -> Image.Image:
    """Black, with the upper left quarter white; size is (width, height)."""
    image = Image.new("L", size, 0)
    image.paste(255, (0, 0, size[0] // 2, size[1] // 2))
    return image


def sixteen_bit() -> Image.Image:
    return Image.fromarray(np.asarray(corner()).astype(np.uint16) * 257)


def see_through() -> Image.Image:
    """Black ink, but nothing at all in the upper left quarter."""
    image = Image.new("RGBA", (56, 56), (0, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 28, 28))
    return image


def sideways() -> tuple[Image.Image, Image.Exif]:
    """Stored turned by a quarter to the left, as EXIF says: turned to the right, the white corner is upper left."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return corner().transpose(Image.Transpose.ROTATE_90), exif


MODES = {
    "grey.png": lambda path: corner().save(path),
    "colour.png": lambda path: corner().convert("RGB").save(path),
    "palette.png": lambda path: corner().convert("P").save(path),
    "palette.gif": lambda path: corner().save(path),
    "one-bit.png": lambda path: corner().convert("1").save(path),
    "grey-alpha.png": lambda path: corner().convert("LA").save(path),
    "colour-alpha.png": lambda path: corner().convert("RGBA").save(path),
    "see-through.png": lambda path: see_through().save(path),
    "16-bit.png": lambda path: sixteen_bit().save(path),
    "16-bit.tiff": lambda path: sixteen_bit().save(path),
    "photo.jpg": lambda path: corner().convert("RGB").save(path, quality=95),
    "cmyk.jpg": lambda path: corner().convert("RGB").convert("CMYK").save(path, quality=95),
    "sideways.jpg": lambda path: sideways()[0].save(path, exif=sideways()[1], quality=95),
    "drawing.bmp": lambda path: corner().save(path),
    "web.webp": lambda path: corner().save(path, lossless=True),
}


@pytest.mark.parametrize("in_shape", [GREY, COLOUR])
@pytest.mark.parametrize("name", MODES)
def test_all_kinds_of_files(tmp_path, name, in_shape):
    MODES[name](tmp_path / name)
    image = load_image(tmp_path / name, in_shape)
    assert image.dtype == torch.uint8
    assert image.shape == in_shape
    assert image[:, 2:12, 2:12].min() > 235
    for rows, columns in ((slice(2, 12), slice(16, 26)), (slice(16, 26), slice(2, 26))):
        assert image[:, rows, columns].max() < 20


def test_colours_stay_in_their_channels_and_become_luma(tmp_path):
    Image.new("RGB", (10, 10), (200, 100, 50)).save(tmp_path / "a.png")
    assert load_image(tmp_path / "a.png", COLOUR)[:, 5, 5].tolist() == [200, 100, 50]
    assert load_image(tmp_path / "a.png", GREY)[0, 5, 5] == pytest.approx(0.299 * 200 + 0.587 * 100 + 0.114 * 50, abs=1)


def test_invert_turns_dark_on_light_into_light_on_dark(tmp_path):
    corner().save(tmp_path / "a.png")
    plain, inverted = (load_image(tmp_path / "a.png", GREY, invert=invert) for invert in (False, True))
    assert torch.equal(inverted, 255 - plain)


@pytest.mark.parametrize(("size", "inside"), [((20, 10), (7, 21, 0, 28)), ((10, 20), (0, 28, 7, 21))])
def test_the_aspect_ratio_is_kept_and_the_rest_has_the_colour_of_the_border(tmp_path, size, inside):
    page = Image.new("L", size, 220)
    page.paste(0, (1, 1, size[0] - 1, size[1] - 1))
    page.save(tmp_path / "a.png")
    top, bottom, left, right = inside
    image = load_image(tmp_path / "a.png", GREY)[0]
    assert (image[14, left + 6 : right - 6] < 20).all()
    outside = torch.ones(28, 28, dtype=torch.bool)
    outside[top:bottom, left:right] = False
    assert (image[outside] == 220).all()
    inverted = load_image(tmp_path / "a.png", GREY, invert=True)[0]
    assert (inverted[outside] == 35).all()


def test_stretching_fills_the_image(tmp_path):
    Image.new("L", (40, 10), 90).save(tmp_path / "a.png")
    wide = corner((80, 20))
    wide.save(tmp_path / "b.png")
    stretched = load_image(tmp_path / "b.png", GREY, fit="stretch")[0]
    assert stretched[2:12, 2:12].min() > 235
    assert stretched[16:, :].max() < 20
    padded = load_image(tmp_path / "b.png", GREY)[0]
    assert padded[:9].max() < 20


def test_fine_detail_is_smoothed_not_sampled(tmp_path):
    checks = (np.indices((280, 280)).sum(0) % 2 * 255).astype(np.uint8)
    Image.fromarray(checks).save(tmp_path / "a.png")
    image = load_image(tmp_path / "a.png", GREY).float()
    assert (image - 127.5).abs().max() < 12


@pytest.mark.parametrize("in_shape", [GREY, COLOUR, (3, 17, 40)])
@pytest.mark.parametrize("size", [(1, 1), (300, 1), (1, 300), (28, 28), (30, 7)])
def test_any_size_fits_any_shape(tmp_path, size, in_shape):
    Image.new("L", size, 77).save(tmp_path / "a.png")
    image = load_image(tmp_path / "a.png", in_shape)
    assert image.shape == in_shape
    assert (image == 77).all()


def test_files_that_are_no_images(tmp_path):
    whole = tmp_path / "whole.png"
    Image.effect_noise((64, 64), 50).save(whole)
    files = {"text.png": b"hello", "empty.png": b"", "half.png": whole.read_bytes()[:1000]}
    for name, contents in files.items():
        (tmp_path / name).write_bytes(contents)
        with pytest.raises(InputError, match=name):
            load_image(tmp_path / name, GREY)
    with pytest.raises(InputError, match=r"missing\.png"):
        load_image(tmp_path / "missing.png", GREY)
    with pytest.raises(InputError, match=str(tmp_path.name)):
        load_image(tmp_path, GREY)
    with pytest.raises(InputError, match="channel"):
        load_image(whole, (2, 28, 28))
    with pytest.raises(InputError, match="fit must be"):
        load_image(whole, GREY, fit="crop")


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_predictions_are_the_networks(model, make_images, batch_size):
    images = make_images(7)
    model.train()
    result = predict(model, images, batch_size=batch_size)
    assert model.training
    output = model.eval()(images / 255)
    np.testing.assert_allclose(result.lengths, output.lengths.detach(), atol=1e-6)
    np.testing.assert_allclose(result.reconstruction, output.reconstruction.detach(), atol=1e-6)
    np.testing.assert_array_equal(result.classes, output.lengths.argmax(1))
    np.testing.assert_array_equal(predict(model, images / 255).lengths, predict(model, images).lengths)


def test_targets_choose_what_is_decoded_and_nothing_else(model, make_images):
    images, targets = make_images(5), torch.tensor([0, 1, 2, 3, 0])
    result, free = predict(model, images, targets, batch_size=2), predict(model, images)
    np.testing.assert_array_equal(result.classes, free.classes)
    np.testing.assert_allclose(
        result.reconstruction, model.eval()(images / 255, targets).reconstruction.detach(), atol=1e-6
    )
    assert np.abs(result.reconstruction - free.reconstruction).max() > 1e-4


def test_networks_without_a_decoder(cnn, make_model, make_images):
    for network in (cnn, make_model(decoder=False)):
        result = predict(network, make_images(3))
        assert result.reconstruction is None
        assert result.lengths.shape == (3, 4)


def test_what_cannot_be_predicted(model, make_images):
    with pytest.raises(InputError, match="at least one image"):
        predict(model, make_images(0))
    with pytest.raises(InputError, match="batch_size"):
        predict(model, make_images(1), batch_size=0)
    with pytest.raises(InputError, match=r"\(1, 3, 8, 10\)"):
        predict(model, make_images(1, (3, 8, 10)))
    with pytest.raises(TypeError, match="int32"):
        predict(model, make_images(1).int())
    with pytest.raises(InputError, match=r"shape \(2,\)"):
        predict(model, make_images(2), torch.tensor([1]))
    with pytest.raises(InputError, match=r"0 to 3.*0\.\.4"):
        predict(model, make_images(2), torch.tensor([0, 4]))
    with pytest.raises(TypeError, match="integers"):
        predict(model, make_images(2), torch.tensor([0.0, 1.0]))


def test_several_objects_in_an_image(make_model, make_images):
    model, images = make_model(objects=2).eval(), make_images(5)
    targets = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]])
    free, told = predict(model, images, batch_size=2), predict(model, images, targets, batch_size=2)
    output = model(images / 255)
    np.testing.assert_array_equal(free.classes, output.lengths.argsort(1, descending=True)[:, :2])
    np.testing.assert_array_equal(told.classes, free.classes)
    np.testing.assert_allclose(free.reconstruction, output.reconstruction.detach(), atol=1e-6)
    np.testing.assert_allclose(told.reconstruction, model(images / 255, targets).reconstruction.detach(), atol=1e-6)
    with pytest.raises(InputError, match=r"\(5, 2\), 2 for each image"):
        predict(model, images, targets[:, 0])
    with pytest.raises(InputError, match="with a class twice"):
        predict(model, images, targets[:, :1].expand(5, 2))
