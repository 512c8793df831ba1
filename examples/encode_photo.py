"""Features of your own photos and videos.

    python examples/encode_photo.py photo.jpg clip.mp4 --model Qwen/Qwen2.5-VL-3B-Instruct

Without arguments it takes a photo of this directory and a small model with random weights, whose features mean nothing,
and needs no network and no GPU.
"""

import argparse
from pathlib import Path

from onereplay import Encoder

PHOTO = Path(__file__).parent / "photos" / "chelsea.png"


def main() -> None:
    """Encode everything as it comes; batches that fit the captured budgets are made on the way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", default=[str(PHOTO)], help="images and videos")
    parser.add_argument("--model", default="preset:internvl3-1b@tiny", help="a hub id, a directory or preset:NAME")
    options = parser.parse_args()
    with Encoder.from_spec(options.model) as encoder:
        for encoded in encoder.encode_each(options.sources):
            if encoded.features is None:
                print(f"{encoded.source}: {encoded.error}")
            else:
                print(f"{encoded.source}: {tuple(encoded.features.shape)} {encoded.features.dtype}; {encoded.plan}")
        print(encoder.report())


if __name__ == "__main__":
    main()
