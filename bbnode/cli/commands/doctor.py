"""`bbnode doctor`: looks for faults of a node on this machine.

Rule: one line per check, PASSED or what to do; exit code 1 when one failed.
"""

from __future__ import annotations

from bbnode.cli import exits, output
from bbnode.cli.common import DEFAULT_CONFIG, ConfigOption, JsonOption, SetOption, load_config


def command(
    config: ConfigOption = DEFAULT_CONFIG, settings: SetOption = None, as_json: JsonOption = False
) -> int:
    """Check disk, clock, ports, program and data of a node.

    Also while it runs.
    """
    from bbnode.daemon.observing import doctor

    findings = []
    for finding in doctor.examine(load_config(config, settings)):
        findings.append(finding)
        if not as_json:
            output.data(f"{finding.verdict:<7}  {finding.check:<15}  {output.cell(finding.detail)}")
            if finding.remedy:
                output.data(f"{'':<7}  {'':<15}  -> {finding.remedy}")
    failed = any(finding.verdict is doctor.CheckResult.FAILED for finding in findings)
    if as_json:
        output.json_object({"ok": not failed, "checks": [f.as_json() for f in findings]})
    return exits.FAILURE if failed else exits.OK
