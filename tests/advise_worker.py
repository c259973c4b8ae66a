"""Run the command line in a job, for tests/test_advise.py: `advise_worker.py ARGUMENT ...`."""

import sys

from gradzip.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
