"""`python -m launch.devices NAME`: what devices a backend finds, as JSON. A process of its own, since it loads torch and drivers."""

import sys

import msgspec

from hw.select import list_devices


class Devices(msgspec.Struct):
    """What one machine has."""

    names: list[str] | None = None  # one for each device; None: ranks share the machine
    driver: str = ""
    error: str = ""  # why they could not be listed


def main() -> int:
    try:
        names, driver = list_devices(sys.argv[1])
        found = Devices(names, driver)
    except Exception as error:  # whatever a driver or a half-installed library throws is what is asked for
        found = Devices(error=f"{type(error).__name__}: {error}".splitlines()[0])
    print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
