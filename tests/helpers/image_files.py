"""Image files of every kind that is read, written by pillow and pydicom."""

import numpy as np
from PIL import Image

MODES_BY_ENDING = {
    "png": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "bmp": ("1", "L", "P", "RGB"),
    "gif": ("L", "P"),
    "jpg": ("L", "RGB", "CMYK"),
    "webp": ("RGB", "RGBA"),
    "tif": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I;16B"),
}
#: Every kind of file that pillow writes: its ending and its mode.
PILLOW_KINDS = [(ending, mode) for ending, modes in MODES_BY_ENDING.items() for mode in modes]


def random_pixels(height, width, bits=8, seed=0):
    generator = np.random.default_rng(seed)
    return generator.integers(0, 2**bits, (height, width), np.uint16 if bits == 16 else np.uint8)


def write_image(path, mode, height=8, width=8, seed=0):
    """Write an image of random pixels in one of pillow's modes; the path's ending is its format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if mode.startswith("I;16"):
        image = Image.fromarray(random_pixels(height, width, 16, seed))
        if mode == "I;16B":
            big_endian = random_pixels(height, width, 16, seed).astype(">u2")
            image = Image.frombytes("I;16B", (width, height), big_endian.tobytes())
    else:
        colours = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
        image = Image.fromarray(colours)
        image = image.convert("L").convert(mode) if mode == "LA" else image.convert(mode)
    image.save(path)
    return path


def write_dicom(path, pixels, **elements):
    """Write a DICOM file by pydicom: (h, w) is grey, (h, w, 3) coloured; `elements` by keyword."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    path.parent.mkdir(parents=True, exist_ok=True)
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    header = Dataset()
    header.file_meta = meta
    header.SOPClassUID = meta.MediaStorageSOPClassUID
    header.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    bits = 8 * pixels.dtype.itemsize
    header.Rows, header.Columns = pixels.shape[:2]
    header.SamplesPerPixel = 3 if pixels.ndim == 3 else 1
    header.PhotometricInterpretation = "RGB" if pixels.ndim == 3 else "MONOCHROME2"
    if pixels.ndim == 3:
        header.PlanarConfiguration = 0
    header.BitsAllocated = header.BitsStored = bits
    header.HighBit = bits - 1
    header.PixelRepresentation = int(pixels.dtype.kind == "i")
    header.PixelData = pixels.tobytes()
    header["PixelData"].VR = "OB" if bits == 8 else "OW"
    for keyword, value in elements.items():
        setattr(header, keyword, value)
    header.save_as(path, enforce_file_format=True)
    return path
