"""``paceline doctor``: what makes training fail or crawl here, and what to do.

A check looks at the machine and returns a finding.  The half that judges reads nothing,
so that tests can give it readings of any machine.  ``command.py`` lists the checks in
the order in which they are printed; a process of their own runs them, for one may crash
or hang.
"""
