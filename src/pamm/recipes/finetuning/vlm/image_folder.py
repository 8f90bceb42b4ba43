"""Images in a folder for each class, as AID and many others come."""

import dataclasses
import random
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from pamm.errors import PammError

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


@dataclasses.dataclass(frozen=True)
class Images:
    """Files, and the number of each one's class."""

    paths: list[Path]
    labels: list[int]
    classes: tuple[str, ...]


def read_images(data: str | Path, validation_share: float) -> tuple[Images, Images]:
    """Training and validation images; looks at every file's header.

    Args:
        data: a folder with CLASS/*.jpg; or with train/CLASS/*.jpg and validation/CLASS/*.jpg.
        validation_share: of each class's images in the first case: a fixed, random choice.

    Raises:
        PammError: if a folder is missing, or empty, or a file is no image.
    """
    folder = Path(data)
    parts = [folder / name for name in ("train", "validation")]
    if all(part.is_dir() for part in parts):
        found, held_out = (_by_class(part) for part in parts)
        if unknown := held_out.keys() - found.keys():
            raise PammError(
                f"{parts[1]} has classes that {parts[0]} has not: {', '.join(sorted(unknown))}."
            )
    else:
        found, held_out = _by_class(folder), {}
        for name, paths in found.items():
            count = max(1, round(validation_share * len(paths)))
            if count >= len(paths):
                raise PammError(
                    f"{folder / name} has {len(paths)} images; a validation_share of "
                    f"{validation_share:g} leaves none to train on."
                )
            chosen = set(random.Random(name).sample(range(len(paths)), count))
            held_out[name] = [path for i, path in enumerate(paths) if i in chosen]
            found[name] = [path for i, path in enumerate(paths) if i not in chosen]
    classes = tuple(found)
    return _images(found, classes), _images(held_out, classes)


def _by_class(folder: Path) -> dict[str, list[Path]]:
    try:
        places = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError as error:
        raise PammError(
            f"cannot read {folder}: {error.strerror}. Give a folder with a folder of images for "
            "each class."
        ) from error
    if len(places) < 2:
        raise PammError(
            f"{folder} has {len(places)} folder(s); it needs one for each class, two or more."
        )
    found = {}
    for place in places:
        paths = sorted(path for path in place.iterdir() if path.suffix.lower() in SUFFIXES)
        if not paths:
            kinds = ", ".join(SUFFIXES)
            raise PammError(f"{place} has no images ({kinds}). Add some, or remove the folder.")
        for path in paths:
            try:
                Image.open(path).close()
            except (OSError, UnidentifiedImageError) as error:
                raise PammError(f"{path} is no image that can be read: {error}.") from error
        found[place.name] = paths
    return found


def _images(found: dict[str, list[Path]], classes: tuple[str, ...]) -> Images:
    rows = [(path, classes.index(name)) for name, paths in found.items() for path in paths]
    return Images([path for path, _ in rows], [label for _, label in rows], classes)
