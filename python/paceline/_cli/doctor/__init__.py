"""``paceline doctor``: what makes training fail or slow here, and what to do.

A check reads the machine and returns a finding.  The half that judges reads nothing, so
that tests can give it readings of any machine.  ``command.py`` lists the checks in the
order of printing; a forked process runs them, because one may crash or hang.
"""
