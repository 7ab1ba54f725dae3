"""What the figures are made of: the server's log, ratios, tables."""

import os
import unittest
from dataclasses import asdict

from testbed import access_log
from testbed.main import describe_disk, together
from testbed.measure import Phase
from testbed.report import Table, markdown
from testbed.stats import Spread, paired_ratio, spread

# As versitygw 1.8 writes them; a key with blanks and a word that looks like an operation.
LOG = """log starts 2026-11-21 07:36:18.761603619 +0000 UTC m=+0.503068513
a bench [21/November/2026:07:36:22 +0000] 127.0.0.1 a 9IEHMW2Y4PUV2PYV s3_PutObject k s3_GetObject one /bench/k%20one 200 - 0 1000000 8 8 - Boto3
a bench [21/November/2026:07:36:22 +0000] 127.0.0.1 a 03PF10IB7HEA6RFD s3_GetObject k one /bench/k%20one 200 - 0 0 0 0 - Boto3
- bench [21/November/2026:07:36:22 +0000] 127.0.0.1 - D0IWU4NQNAMFUZGN s3_GetObject nokey /bench/nokey 404 NoSuchKey 0 0 0 0 - Boto3
a bench [21/November/2026:07:36:22 +0000] 127.0.0.1 a AG1KM335MZ6A8X5P s3_ListObjectsV2 - /bench?list-type=2 200 - 491 0 0 0 - Boto3
a bench [21/November/2026:07:36:22 +0000] 127.0.0.1 a 3EI9EJQ23G1PN1QP s3_CreateMultipartUpload m /bench/m?uploads 200 - 202 0 1 1 - Boto3
a bench [21/November/2026:07:36:22 +0000] 127.0.0.1 a HWZYTXJAU5V6RE7T s3_UploadPart m /bench/m?uploadId=f68080bc 200 - 0 0 399 399 - Boto3
a bench [21/November/2026:07:36:22 +0000] 127.0.0.1 a 9F9UHGTDM91NGJF3 s3_CompleteMultipartUpload m /bench/m?uploadId=f6 200 - 344 0 43 43 -
a bench [21/November/2026:07:36:22 +0000] 127.0.0.1 a PAS9U6782UGDCO95 s3_DeleteObject m /bench/m 200 - 0 0 5 5 - Boto3
"""


class Log(unittest.TestCase):
    def test_every_request_counts_once_under_its_operation(self) -> None:
        found = access_log.operations(LOG.splitlines())
        self.assertEqual(found["GetObject"], 2)
        self.assertEqual(sum(found.values()), 8)

    def test_all_that_uploads_is_a_put(self) -> None:
        kinds = access_log.kinds(access_log.operations(LOG.splitlines()))
        self.assertEqual(kinds, {"put": 4, "get": 2, "other": 2})


class Disk(unittest.TestCase):
    def test_too_little_room_for_caches_is_said(self) -> None:
        # Of 100 GiB, 8 are kept for root: who writes has 20, and 10.
        def room(free: int) -> str:
            return describe_disk(os.statvfs_result((4096, 1 << 30, 100, free + 8, free, 0, 0, 0, 0, 255)))
        self.assertEqual(room(20), "20 of 100 GiB free")
        self.assertIn("10 of 100 GiB free (TOO LITTLE", room(10))


class Ratios(unittest.TestCase):
    def test_a_ratio_pairs_what_ran_in_the_same_round(self) -> None:
        # The machine was twice as fast in round 1: the ratio is the same, and that of the medians would not be.
        self.assertEqual(paired_ratio({0: 10, 1: 20, 2: 10}, {0: 5, 1: 10, 2: 5}), Spread(2, 2, 2, 3))

    def test_rounds_that_one_of_them_lacks_do_not_count(self) -> None:
        self.assertEqual(paired_ratio({0: 10, 1: 1000}, {0: 5}), Spread(2, 2, 2, 1))
        self.assertIsNone(paired_ratio({1: 10}, {0: 5}))

    def test_a_spread_is_the_median_and_the_ends(self) -> None:
        self.assertEqual(spread([3, 1, 10]), Spread(3, 1, 10, 3))
        self.assertIsNone(spread([]))


def result(target: str, number: int, seconds: float) -> dict[str, object]:
    phase = Phase("write", 100, "file", seconds, 100 << 20, cpu=0.01, meta_cpu=0.002, server_cpu=1, peak_mib=50,
                  operations={"PutObject": 100, "HeadObject": 1}, up=105_000_000, down=1000)
    return {"platform": "near", "round": number, "workload": "job56", "target": target, "phases": [asdict(phase)]}


class Report(unittest.TestCase):
    RESULTS = [result("rfs", 0, 1), result("peer", 0, 4), result("peer", 1, 8), result("rfs", 1, 4),
               {"platform": "near", "round": 0, "workload": "job56", "target": "other", "error": "no rename\nmore"}]

    def test_a_row_tells_rates_ratios_and_costs(self) -> None:
        text = markdown([], self.RESULTS, {"job56": "Small files."})
        self.assertIn("| rfs | 62.5 (25–100) | 62.5 (25–100) |  | 100 + 20 | 50 | 100 | 0 | 1 | 105 | 0.001 |", text)
        self.assertIn("| peer | 18.8 (12.5–25) | 18.8 (12.5–25) | 3 × (2–4) |", text)

    def test_rounds_of_different_runs_do_not_pair(self) -> None:
        merged = together([[result("rfs", 0, 1), result("peer", 0, 4)], [result("rfs", 0, 2), result("other", 0, 2)]])
        table = Table("job56", "near", merged)
        self.assertEqual(table.ratio("write", "rfs", "peer"), Spread(4, 4, 4, 1))
        self.assertEqual(table.ratio("write", "rfs", "other"), Spread(1, 1, 1, 1))

    def test_a_failure_is_told_and_not_left_out(self) -> None:
        self.assertIn("other, round 1: no rename", markdown([], self.RESULTS, {}))

    def test_the_order_of_targets_is_that_of_the_first_round(self) -> None:
        self.assertEqual(Table("job56", "near", self.RESULTS).targets(), ["rfs", "peer"])


if __name__ == "__main__":
    unittest.main()
