"""Tests on several hosts need network namespaces, those of accelerators one of these; elsewhere they are not collected.

For the former the report's head says why.
"""

from hw.testing import available_backends
from tests.launch.network import why_not

_WHY_NOT = why_not()
collect_ignore = ["test_hosts.py", "test_pd_hosts.py"] if _WHY_NOT else []
if available_backends() == ["cpu"]:
    collect_ignore.append("test_pd_devices.py")


def pytest_report_header() -> list[str]:
    return [f"tests on several hosts are left out: {_WHY_NOT}"] if _WHY_NOT else []
