"""The command `penstock`: starts the processes of a service, and speaks with a running one."""

import sys

from penstock.rooms import rooms_directory

# Before its modules are imported, which print as `shared.printable` has it. Not `reach_rooms`: a
# program that imports this keeps its environment.
if str(rooms_directory()) not in sys.path:
    sys.path.insert(0, str(rooms_directory()))
