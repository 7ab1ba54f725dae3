"""versitygw's access log: which requests a store was asked for."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

# owner bucket [date zone] address requester request-id OPERATION key uri status …; the key may hold blanks, so nothing
# after the operation is looked at.
_LINE = re.compile(r"^\S+ \S+ \[[^]]*\] \S+ \S+ \S+ (?:s3_|admin_)?(\w+) ")

# What a provider bills together and a network waits for alike.
KINDS = {
    "PutObject": "put", "UploadPart": "put", "CopyObject": "put", "UploadPartCopy": "put",
    "CreateMultipartUpload": "put", "CompleteMultipartUpload": "put", "AbortMultipartUpload": "put",
    "GetObject": "get",
}


def operations(lines: Iterable[str]) -> Counter[str]:
    """Requests by their S3 operation (`PutObject`, `UploadPart`, …)."""
    return Counter(found.group(1) for line in lines if (found := _LINE.match(line)))


def kinds(counts: Mapping[str, int]) -> dict[str, int]:
    """Requests by kind: `put` (all that upload), `get`, and `other` (head, list, delete, …)."""
    result = {"put": 0, "get": 0, "other": 0}
    for operation, count in counts.items():
        result[KINDS.get(operation, "other")] += count
    return result
