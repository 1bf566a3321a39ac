"""Image files become arrays in one way: upright, in 8 bits, over white, the same through every door."""

import io
import struct

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torch import nn

from alight import Normalisation, attach_heads
from alight.cluster.shards import open_data
from alight.data.batches import Collate, as_inputs, load_data
from alight.data.preprocess import InputSpec, TensorSpec, flattened, image_batch
from alight.data.samples import picture
from alight.errors import BadFile, BadInput
from alight.serve.model import ServedModel
from alight.serve.reading import count_samples, read_samples
from alight.serve.requests import Limits

RNG = np.random.default_rng(0)
GREY, COLOUR = RNG.integers(256, size=(6, 7), dtype=np.uint8), RNG.integers(256, size=(6, 7, 3), dtype=np.uint8)
DEEP = RNG.integers(65536, size=(6, 7), dtype=np.uint16)
ALPHA = RNG.integers(256, size=(6, 7), dtype=np.uint8)
TURNS = {
    1: lambda upright: upright,
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.swapaxes(0, 1),
    6: lambda upright: np.rot90(upright),
    7: lambda upright: upright[::-1, ::-1].swapaxes(0, 1),
    8: lambda upright: np.rot90(upright, -1),
}  # how a camera stores an upright image, by EXIF orientation


def spec(channels=3, size=(6, 7), dtype="float32", known=True):
    normalisation = Normalisation((0.5, 0.4, 0.3)[:channels], (0.2, 0.25, 0.3)[:channels]) if known else None
    return InputSpec((TensorSpec("images", (None, channels, *size), dtype),), normalisation=normalisation)


def saved(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(upright, orientation, kind="PNG", **options):
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.ascontiguousarray(TURNS[orientation](upright))
    return saved(Image.fromarray(stored), kind, exif=exif, **options)


def opened(content):
    return Image.open(io.BytesIO(content))


def read(content):
    return np.asarray(picture(io.BytesIO(content)))


def over_white(colour, alpha):
    share = alpha.astype(float)[..., None] / 255 if colour.ndim == 3 else alpha / 255
    return colour * share + 255 * (1 - share)


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_a_picture_is_turned_as_its_orientation_says(orientation, kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    assert np.array_equal(read(turned(COLOUR, orientation, kind, **options)), COLOUR)


@pytest.mark.parametrize("orientation", TURNS)
def test_a_photo_is_turned_as_its_orientation_says(orientation):
    smooth = np.add.outer(np.arange(24), 3 * np.arange(40)).astype(np.uint8)  # JPEG keeps it but for a few shades
    made = read(turned(smooth, orientation, "JPEG", quality=100))
    assert made.shape == smooth.shape
    assert np.abs(made.astype(int) - smooth).max() < 5


def test_16_bits_become_their_upper_8_instead_of_being_clipped():
    for kind in ("PNG", "TIFF"):
        assert np.array_equal(read(saved(Image.fromarray(DEEP), kind)), DEEP >> 8)
    by_257 = GREY.astype(np.uint16) * 257  # as most programs make 16 bits from 8
    assert np.array_equal(read(saved(Image.fromarray(by_257), "PNG")), GREY)
    big = Image.frombytes("I;16B", (7, 6), DEEP.astype(">u2").tobytes())
    assert np.array_equal(np.asarray(flattened(big)), DEEP >> 8)


def test_what_is_transparent_lies_over_white():
    made = read(saved(Image.fromarray(np.dstack([COLOUR, ALPHA])), "PNG"))
    assert np.abs(made - over_white(COLOUR, ALPHA)).max() <= 1
    made = read(saved(Image.fromarray(np.dstack([GREY, ALPHA]), "LA"), "PNG"))
    assert np.abs(made[..., 0] - over_white(GREY, ALPHA)).max() <= 1
    premultiplied = Image.fromarray(np.dstack([GREY, ALPHA]), "LA").convert("La")
    assert np.abs(np.asarray(flattened(premultiplied))[..., 0] - over_white(GREY, ALPHA)).max() <= 2


def test_a_single_transparent_shade_lies_over_white():
    for stored, clear in ((GREY, int(GREY[2, 3])), (DEEP, int(DEEP[2, 3])), (COLOUR, tuple(COLOUR[2, 3].tolist()))):
        made = read(saved(Image.fromarray(stored), "PNG", transparency=clear)).reshape(6, 7, -1)
        opaque = read(saved(Image.fromarray(stored), "PNG")).reshape(6, 7, -1)
        assert (made[2, 3] == 255).all()
        hidden = (stored == np.array(clear)).reshape(6, 7, -1).all(axis=2)
        assert (made[~hidden] == opaque[~hidden]).all()


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_palettes_are_looked_up_and_their_transparent_entry_lies_over_white(kind):
    palette = Image.fromarray(GREY % 4, "P")
    colours = np.array([[10, 20, 30], [200, 100, 0], [0, 0, 0], [255, 0, 255]], dtype=np.uint8)
    palette.putpalette(colours.ravel().tolist())
    assert np.array_equal(read(saved(palette, kind)), colours[GREY % 4])
    colours[2] = 255
    assert np.array_equal(read(saved(palette, kind, transparency=2)), colours[GREY % 4])


def test_bits_inks_and_frames_are_read():
    bits = Image.fromarray(GREY > 100)
    assert np.array_equal(read(saved(bits, "PNG"))[..., 0], np.where(GREY > 100, 255, 0))
    inks = Image.fromarray(np.dstack([COLOUR, np.zeros_like(GREY)]), "CMYK")
    assert np.array_equal(read(saved(inks, "TIFF")), 255 - COLOUR)
    frames = [Image.fromarray(each) for each in (GREY, 255 - GREY)]
    assert np.array_equal(read(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))[..., 0], GREY)


def tiff_of_12_bits():
    """Two pixels, black and white, in 12 bits each: Pillow does not write them."""
    tags = {256: 2, 257: 1, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: 3}
    entries = b"".join(struct.pack("<HHII", tag, 3, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 12) + b"\x00\x0f\xff\0" + struct.pack("<H", len(tags)) + entries + b"\0\0\0\0"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (saved(Image.fromarray(GREY.astype(np.float32)), "TIFF"), "mode F with numbers from [0-9]+ to 2[0-9]+"),
        (saved(Image.fromarray(GREY.astype(np.int32)), "TIFF"), "mode I with numbers from"),
        (saved(Image.fromarray(DEEP), "TIFF", tiffinfo={262: 0}), "mode I;16 with numbers from"),
        (tiff_of_12_bits(), "mode I;16 with numbers from 0 to 4095"),
    ],
)
def test_numbers_whose_black_and_white_are_unknown_are_refused(content, message, tmp_path):
    (tmp_path / "one.tif").write_bytes(content)
    with pytest.raises(BadFile, match=rf"one\.tif: .*{message} .* save it in 8 or 16 bits, or give arrays"):
        next(iter(load_data(tmp_path, spec())))
    with pytest.raises(BadInput, match=message):
        as_inputs([opened(content)], spec())


def files():
    """Return an image of each kind whose bytes Pillow decodes to something other than upright RGB in 8 bits."""
    smooth = np.add.outer(np.arange(24), 3 * np.arange(40)).astype(np.uint8)
    palette = Image.fromarray(GREY % 4, "P")
    palette.putpalette([10, 20, 30, 200, 100, 0, 0, 0, 0, 255, 0, 255])
    return {
        "turned.jpg": turned(smooth, 6, "JPEG"),
        "turned.png": turned(COLOUR, 8),
        "deep.png": saved(Image.fromarray(DEEP), "PNG"),
        "alpha.png": saved(Image.fromarray(np.dstack([COLOUR, ALPHA])), "PNG"),
        "alpha.webp": saved(Image.fromarray(np.dstack([COLOUR, ALPHA])), "WEBP", lossless=True),
        "grey_alpha.png": saved(Image.fromarray(np.dstack([GREY, ALPHA]), "LA"), "PNG"),
        "clear.gif": saved(palette, "GIF", transparency=2),
        "bits.png": saved(Image.fromarray(GREY > 100), "PNG"),
        "inks.jpg": saved(Image.fromarray(np.dstack([COLOUR, GREY]), "CMYK"), "JPEG"),
        "plain.bmp": saved(Image.fromarray(COLOUR), "BMP"),
        "moving.gif": animated("GIF"),
        "moving.png": animated("PNG"),
        "moving.webp": animated("WEBP", lossless=True),
    }


def animated(kind, **options):
    first, *others = (Image.fromarray(each) for each in (COLOUR, 255 - COLOUR, COLOUR // 2))
    return saved(first, kind, save_all=True, append_images=others, **options)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_of_several_frames_the_first_is_read(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    assert opened(animated(kind, **options)).n_frames == 3
    assert np.array_equal(read(animated(kind, **options)), COLOUR)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_file_gives_the_same_array_through_every_door(channels, tmp_path):
    content = {name: files()[name] for name in sorted(files())}
    folder = tmp_path / "folder" / "one"
    folder.mkdir(parents=True)
    for name, each in content.items():
        (folder / name).write_bytes(each)
    network = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.Flatten(), nn.Linear(4 * 5 * 4, 2))
    normalisation = spec(channels, (7, 6)).normalisation
    example, classes = torch.zeros(2, channels, 7, 6), ("one", "two")
    model = attach_heads(network, ["0"], example=example, classes=classes, normalisation=normalisation)
    takes = model.input_spec
    (batch,) = load_data(folder.parent, takes)
    (expected,) = batch.inputs
    assert batch.labels.tolist() == [0] * len(content)

    doors = {"Predictor": as_inputs([*map(opened, content.values())], takes)[0]}
    doors["opened and copied"] = image_batch([opened(each).copy() for each in content.values()], takes)
    served = ServedModel({}, takes, None, (), "")
    unread = count_samples("images", [*content.values()], served, Limits())
    doors["serve"] = np.concatenate(read_samples(unread, served))
    (by_torchvision,) = load_data(f"imagefolder:{folder.parent}", takes, shuffle=False)
    (doors["torchvision"],) = by_torchvision.inputs
    column = datasets.Features({"image": datasets.Image()})
    rows = [{"bytes": each, "path": None} for each in content.values()]
    datasets.Dataset.from_dict({"image": rows}, features=column).save_to_disk(tmp_path / "hugging_face")
    (by_hugging_face,) = load_data(tmp_path / "hugging_face", takes)
    (doors["Hugging Face"],) = by_hugging_face.inputs
    parquet.write_table(pa.table({"image": [*content.values()]}), tmp_path / "rows.parquet")
    for name, where in {"Ray folder": folder.parent, "Ray Parquet": tmp_path / "rows.parquet"}.items():
        data = open_data(str(where), model, 100)
        inputs, labels = zip(*data.shards[0].samples(), strict=True)
        (doors[name],) = Collate(takes, data.where)(([*inputs], [*labels])).inputs
    right = dict(zip(content, expected, strict=True))
    for door, made in doors.items():
        names = [
            name for name in content if door != "torchvision" or not name.endswith(".gif")
        ]  # which it does not read
        wrong = [name for name, ours in zip(names, np.asarray(made), strict=True) if (ours != right[name]).any()]
        assert not wrong, f"{door}: {wrong}"


@pytest.mark.parametrize(
    "given",
    [
        GREY[None],
        torch.from_numpy(GREY[None]),
        [GREY[None]],
        [Image.fromarray(GREY)],
        Image.fromarray(GREY),
    ],
)
def test_a_network_of_unknown_normalisation_refuses_bytes_and_takes_floats(given):
    unknown, unchanged = spec(1, known=False), InputSpec(spec(1).tensors, normalisation=Normalisation((0,), (1,)))
    with pytest.raises(BadInput, match=r"unknown: give Normalisation\(mean, std\), as preprocess= of fit or"):
        as_inputs(given, unknown)
    assert not unknown.takes_pictures
    assert np.array_equal(as_inputs(given, unchanged)[0], (GREY / np.float32(255))[None, None])
    floats = RNG.normal(size=(2, 1, 6, 7)).astype(np.float32)
    assert as_inputs(floats, unknown)[0] is floats
    assert np.array_equal(image_batch(floats, unknown), floats)


@pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.int32])
def test_whole_numbers_that_are_not_bytes_are_not_taken_for_floats(dtype):
    for given in (GREY[None].astype(dtype), torch.from_numpy(GREY[None].astype(dtype)), [GREY[None].astype(dtype)]):
        with pytest.raises(BadInput, match=rf"images of {np.dtype(dtype)}: give bytes \(uint8\), or float32"):
            as_inputs(given, spec(1))


def test_a_network_of_bytes_gets_bytes_from_files_too(tmp_path):
    Image.fromarray(GREY).save(tmp_path / "one.png")
    for known in (True, False):
        (batch,) = load_data(tmp_path, spec(1, dtype="uint8", known=known))
        (made,) = batch.inputs
        assert made.dtype == np.uint8
        assert np.array_equal(made, GREY[None, None])
    with pytest.raises(BadInput, match="images of float64: give bytes"):
        image_batch(GREY[None] / 255, spec(1, dtype="uint8"))


@pytest.mark.parametrize(("mean", "std"), [((), ()), ((0.5,), (0.5, 0.5)), ((0.5,), (0.0,)), ((float("nan"),), (1,))])
def test_a_normalisation_without_meaning_is_refused(mean, std):
    with pytest.raises(BadInput, match="give a finite mean and a positive std for each channel"):
        Normalisation(mean, std)
