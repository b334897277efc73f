"""Tests on several hosts run where network namespaces can be made; elsewhere they are not collected, and the report's head says why."""

from tests.launch.network import why_not

_WHY_NOT = why_not()
collect_ignore = ["test_hosts.py", "test_pd_hosts.py"] if _WHY_NOT else []


def pytest_report_header() -> list[str]:
    return [f"tests on several hosts are left out: {_WHY_NOT}"] if _WHY_NOT else []
