"""DICOM files of drawn pictures, with the name and number of a patient who does not exist."""

from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from pydicom.dataset import FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage

PATIENT = ("Quillfeather^Zebediah", "PID-7702-XQ", "Dr. Wolverhampton")
"""Name and identifier of the patient, and the physician, in every file."""


def write_dicom(path: Path, numbers: np.ndarray[Any, Any], bits: int = 12, **fields: Any) -> None:
    """Write numbers (H, W), (n, H, W) or (H, W, 3) as a DICOM file; other fields by their names."""
    file = pydicom.Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file.file_meta.MediaStorageSOPClassUID = file.SOPClassUID = SecondaryCaptureImageStorage
    file.file_meta.MediaStorageSOPInstanceUID = file.SOPInstanceUID = "1.2.3.4"
    file.PatientName, file.PatientID, file.ReferringPhysicianName = PATIENT
    is_colour = numbers.ndim == 3 and numbers.shape[2] == 3
    if numbers.ndim == 3 and not is_colour:
        file.NumberOfFrames = len(numbers)
    file.Rows, file.Columns = numbers.shape[:2] if is_colour else numbers.shape[-2:]
    file.SamplesPerPixel, file.PhotometricInterpretation = (3, "RGB") if is_colour else (1, "MONOCHROME2")
    if is_colour:
        file.PlanarConfiguration = 0
    file.BitsStored, file.BitsAllocated, file.HighBit = bits, 8 if bits <= 8 else 16, bits - 1
    file.PixelRepresentation = int(fields.pop("signed", False))
    dtype = {(8, 0): np.uint8, (8, 1): np.int8, (16, 0): np.uint16, (16, 1): np.int16}
    file.PixelData = numbers.astype(dtype[file.BitsAllocated, file.PixelRepresentation]).tobytes()
    for name, value in fields.items():
        setattr(file, name, value)
    file.save_as(path, enforce_file_format=True)


def write_series(
    folder: Path, numbers: np.ndarray[Any, Any], spacing: tuple[float, float, float] = (3.0, 0.5, 2.0), **fields: Any
) -> list[Path]:
    """Write slices (D, H, W), from the lowest to the highest, of a patient who lies on the back, in mixed file names.

    Rows lie from front to back and columns from right to left in the body. Fields may be functions of the number of a
    slice. Return the files in the order of the slices.
    """
    folder.mkdir(parents=True, exist_ok=True)
    order, files = np.random.default_rng(len(numbers)).permutation(len(numbers)), list[Path]()
    step, down, along = spacing
    for n, each in enumerate(numbers):
        files.append(folder / f"{order[n]:03d}.dcm")
        own: dict[str, Any] = {"SeriesInstanceUID": "1.2.3", "PixelSpacing": [down, along], "bits": 12}
        own |= {"ImageOrientationPatient": [1, 0, 0, 0, 1, 0], "ImagePositionPatient": [10.0, -20.0, 5 + n * step]}
        own |= {name: value(n) if callable(value) else value for name, value in fields.items()}
        write_dicom(files[-1], each, own.pop("bits"), **own)
    return files
