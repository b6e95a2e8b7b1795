"""What pytest's own processes import."""

import subprocess
import sys

from tests.support.markdown import ROOT


def test_the_process_that_gives_tests_to_workers_imports_neither_torch_nor_the_package():
    code = "import sys, tests.conftest; print(sys.modules.keys() & {'torch', 'lightning', 'lightning_obs'})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
