"""The arguments of ``etude fleet``."""

from __future__ import annotations

from etude.cli.arguments import Commands, Parser, add, within


def fleet_commands(commands: Commands[Parser]) -> None:
    """Add the group."""
    fleet = commands.add_parser("fleet", help="the engines that joined a run from elsewhere")
    group = fleet.add_subparsers(required=True, metavar="COMMAND")
    listing = add(group, "list", "fleet:listed", "each engine: state, version, load")
    drain = add(group, "drain", "fleet:drain", "give an engine nothing new; it leaves when it has finished")
    join = add(group, "join", "fleet:join", "register an engine of any kind that runs already, and keep it registered")
    for one in (listing, drain, join):
        one.add_argument("registry", metavar="REGISTRY", help="http://HOST:PORT, the run's fleet.listen")
    drain.add_argument("name", metavar="ENGINE")
    join.add_argument("engine", metavar="URL", help="of the engine, as the run reaches it")
    join.add_argument("--name", required=True)
    join.add_argument("--wait-s", type=within(0, 1e7), help="for a registry that is away (default 3600)")
    join.add_argument("--region", default="", help="its lane in the report (default: its name)")
    join.add_argument("--standby", action="store_true", help="work when others are lost")
