"""HTML report of a run, or comparison of several runs: one self-contained page.

The page is made from the runs' folders alone. So it can be written again at any time: during a run, after it was
killed, or on another machine.
"""

from megarl.ops.report.command import compare_runs, report_run
from megarl.ops.report.run_files import NoRunError

__all__ = ["NoRunError", "compare_runs", "report_run"]
