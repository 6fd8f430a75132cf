import subprocess
import sys

CODE = """
import time
before_imports = time.monotonic()
time.sleep(0.5)
from megarl.base.run_clock import run_started, start_run_clock
start_run_clock()
first = run_started()
start_run_clock()
print(before_imports - first, run_started() - before_imports)
"""


def test_the_clock_counts_imports_and_starts_again_in_a_sweep():
    output = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    before, second = map(float, output.split())
    assert -0.05 < before < 5  # create_time has hundredths of a second
    assert second >= 0.5
