import subprocess
import sys
import time

CODE = """
import time
before_imports = time.monotonic()
time.sleep(0.5)
from megarl.base.run_clock import run_started, start_run_clock
start_run_clock()
first = run_started()
start_run_clock()
print(before_imports, first, run_started())
"""


def test_the_clock_counts_imports_and_starts_again_in_a_sweep():
    begin = time.monotonic()
    output = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    before_imports, first, second = map(float, output.split())
    # create_time has hundredths of a second, from a boot time in whole seconds
    assert begin - 1.1 < first < before_imports + 0.05
    assert second - before_imports >= 0.5
