"""Pictures of one shade, parts of messages that show them, and their reader."""

import base64
import io
import json
import threading

from make_squares import PROCESSOR
from PIL import Image as pil

from megarl.base.image_files import ImageProcessor
from megarl.base.image_tokens import RemoteFile
from megarl.data.images import ImageReader


def picture(shade, size=(56, 56)):
    return pil.new("RGB", size, (shade, shade, 0))


def png(shade, size=(56, 56)):
    file = io.BytesIO()
    picture(shade, size).save(file, "PNG")
    return file.getvalue()


def url(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def part(image):
    return {"type": "image", "image": image}


def url_part(address):
    return {"type": "image_url", "image_url": {"url": address}}


def text_part(text):
    return {"type": "text", "text": text}


def squares_reader(folder, tokenizer):
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
    return ImageReader(ImageProcessor(str(folder)), tokenizer.convert_tokens_to_ids("<|image_pad|>"))


class WatchedFile(RemoteFile):
    """A file in a store; records the threads that read it."""

    def __init__(self, data):
        self.data, self.readers = data, []

    def __len__(self):
        return len(self.data)

    def read(self):
        self.readers.append(threading.get_ident())
        return self.data
