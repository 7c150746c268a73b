"""The recording hook, which runs without ringtap, repeats parts of the schema."""

import json

import pytest

from ringtap.agents.hook.ringtap_hook import agent_start, ddp, files, steps
from ringtap.core import python_command, records, schema

pytestmark = pytest.mark.computes


def test_the_hook_writes_the_record_format_of_this_version() -> None:
    header = json.loads(files.header(steps._FIELDS, {}))
    assert (header["format"], header["version"]) == (records.FORMAT, records.VERSION)


def test_the_hook_writes_the_columns_that_readers_need() -> None:
    for needed, fields in ((schema.STEP_COLUMNS, steps._FIELDS), (schema.DDP_COLUMNS, ddp._FIELDS)):
        written = {column["name"]: column["type"] for column in json.loads(files.header(fields, {}))["fields"]}
        assert [name for name, allowed in needed.items() if written.get(name) not in allowed] == []


def test_the_hook_starts_an_agent_as_ringtap_starts_python() -> None:
    assert agent_start.RUN_MODULE == python_command.RUN_MODULE
