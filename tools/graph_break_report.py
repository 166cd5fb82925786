"""``python tools/graph_break_report.py TARGET``: the same as ``dtensor-compile report TARGET``, from a checkout."""

import sys

from dtensor_compile.report.report_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "graph_break_report.py"))
