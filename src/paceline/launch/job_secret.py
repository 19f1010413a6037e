"""A secret for a job on one host, in memory that its ranks inherit: other processes can read the environment
and command lines, but not a file descriptor.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import replace

from paceline.errors import ConfigError
from paceline.launch.plan import Plan
from paceline.rendezvous.resource_limits import explain
from paceline.rendezvous.secret import MEMORY_VARIABLE, NO_SECRET, make_secret, users_secret

_REFUSED = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL})


def with_secret(plan: Plan, inherited: Mapping[str, str] | None = None) -> Plan:
    """Add a new secret to a plan, unless the user has given one.

    The last of the plan's `inherited_fds` then holds it; the caller closes that descriptor after starting the
    job. If the kernel refuses such memory, the plan is unchanged, and the job has no secret.
    """
    if users_secret(os.environ if inherited is None else inherited) is not NO_SECRET:
        return plan
    try:
        fd = make_secret()
    except OSError as error:
        if error.errno in _REFUSED:
            return plan
        likely, hint = explain(error.errno or 0)
        raise ConfigError(
            "The ranks can't be given a secret in memory.", seen=str(error), likely=likely, hint=hint
        ) from error
    return replace(
        plan,
        environments=tuple({**each, MEMORY_VARIABLE: str(fd)} for each in plan.environments),
        inherited_fds=(*plan.inherited_fds, fd),
    )
