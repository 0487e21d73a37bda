"""The ops: one signature each, a plain-torch twin, and backends that must agree with it."""
