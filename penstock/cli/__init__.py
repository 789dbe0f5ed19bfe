"""The command `penstock`: starts the processes of a service, and speaks with a running one."""

from penstock.rooms import import_rooms

# Before its modules are imported, which print as `shared.printable` has it. Not `reach_rooms`: a
# program that imports this keeps its environment.
import_rooms()
