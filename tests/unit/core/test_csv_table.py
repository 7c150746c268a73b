"""Tables that users give: no row has more cells than columns, so that a decimal comma is never read as two numbers."""

import pytest

from ringtap.analysis.sweeps.points_csv import read_points_csv, read_table
from ringtap.core.csv_table import read_csv
from ringtap.core.errors import UsageError
from ringtap.workload.simulator_logs import read_log
from ringtap.workload.timed_tensors import read_tensors

pytestmark = pytest.mark.computes

HEAD = "bandwidth_gbps,iteration_s\n"
REMEDY = r"write ',' between cells, and a point in decimals \(0\.1\)"


def write(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD + "0,1\n0,1,365\n", "line 3 has 3 cells between ',' but the header has 2 columns"),
        (HEAD + "0,1,0,365\n", "line 2 has 4 cells"),
        (HEAD + "0,1;0,365\n", "line 2 has 3 cells"),
        ("bandwidth_gbps;iteration_s\n0,1;0,365\n", "line 1 has ';' between its cells"),
        ("bandwidth_gbps;iteration_s;count\n0.1;0.365;3\n", "line 1 has ';' between its cells"),
        ("bandwidth_gbps\titeration_s\n0,1\t0,365\n", "line 1 has tabs between its cells"),
    ],
)
def test_a_decimal_comma_is_refused_with_the_separator_named(tmp_path, text, says):
    with pytest.raises(UsageError, match=f"table.csv {says}.*: {REMEDY}"):
        read_points_csv(write(tmp_path, text), 25.0)


def test_a_quoted_decimal_comma_is_no_number(tmp_path):
    with pytest.raises(UsageError, match="line 2: iteration_s is '0,365', not a number"):
        read_points_csv(write(tmp_path, HEAD + '0,"0,365"\n'), 25.0)


def test_every_reader_of_a_users_table_refuses_rows_that_are_too_long(tmp_path):
    path = write(tmp_path, "model,traffic,bandwidth_gbps,iteration_s\nvgg16,iperf,0,1,365\n")
    with pytest.raises(UsageError, match="line 2 has 5 cells"):
        read_table(path, 25.0, 3)
    path = write(tmp_path, "name,bytes,forward_ms,backward_ms\na,100,0,5,1\n")
    with pytest.raises(UsageError, match="line 2 has 5 cells"):
        read_tensors(path)
    path = write(tmp_path, "name,run,fwd compute,workload finished at\nconv,one,0,5,7\n")
    with pytest.raises(UsageError, match="line 2 has 5 cells"):
        read_log(path)


def test_empty_cells_at_the_end_and_short_rows_are_read(tmp_path):
    header, rows = read_csv(write(tmp_path, "a,b,\n\n1, 2,,\n3\n"), ("a", "b"))
    assert header == ["a", "b", ""]
    assert rows == [(3, ["1", "2", "", ""]), (4, ["3"])]


def test_a_file_of_the_largest_size_is_read_and_a_larger_one_refused(tmp_path):
    path = write(tmp_path, "a\n1\n")
    assert read_csv(path, ("a",), 4)[1] == [(2, ["1"])]
    with pytest.raises(UsageError, match="has more than 3 bytes"):
        read_csv(path, ("a",), 3)
