"""What a written page carries."""

import base64
import gzip
import json
import re
from typing import Any


def data_of(page: bytes) -> dict[str, Any]:
    """What a page carries."""
    found = re.search(rb'<script id="data"[^>]*>([^<]*)</script>', page)
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))
