"""The recording hook, which runs without ringtap, repeats parts of the schema."""

import json

import pytest

from ringtap.agents.hook.ringtap_hook import agent_start, ddp_logging_data, record_files, steps
from ringtap.core import append_only_logs, isolated_python, run_directory_schema

pytestmark = pytest.mark.computes


def test_the_hook_writes_the_record_format_of_this_version() -> None:
    header = json.loads(record_files.header(steps._FIELDS, {}))
    assert (header["format"], header["version"]) == (append_only_logs.FORMAT, append_only_logs.VERSION)


def test_the_hook_writes_the_columns_that_readers_need() -> None:
    for needed, fields in (
        (run_directory_schema.STEP_COLUMNS, steps._FIELDS),
        (run_directory_schema.PASS_COLUMNS, ddp_logging_data.FIELDS),
    ):
        written = {column["name"]: column["type"] for column in json.loads(record_files.header(fields, {}))["fields"]}
        assert [name for name, allowed in needed.items() if written.get(name) not in allowed] == []


def test_the_hook_starts_an_agent_as_ringtap_starts_python() -> None:
    assert agent_start.RUN_MODULE == isolated_python.RUN_MODULE
