"""What the command calls to run regate: `serve` in this process, `dev` with everything on this machine.

Knows how options become settings. Every function returns an exit code and says on stderr what is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.app import EXIT_USAGE, ROLES, run_serve, say
from orchestrator.settings import ListenTable, Settings, SettingsError, find_settings, parse_listen


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `regate serve`; None or empty takes what the settings say."""

    config: Path | None = None
    data: Path | None = None
    roles: str = "orchestrator,gateway"
    redis_url: str | None = None
    allow_volatile: bool = False
    assume_durable: bool = False
    listen: str | None = None
    gateway_listen: str | None = None
    gateway_url: str = ""


def serve(options: ServeOptions) -> int:
    """`regate serve`: run roles in this process until SIGTERM or Ctrl-C."""
    try:
        settings = settings_for(options)
    except SettingsError as error:
        say(str(error))
        return EXIT_USAGE
    roles = frozenset(name.strip() for name in options.roles.split(",") if name.strip())
    if "all" in roles:
        roles = ROLES
    return run_serve(settings, roles, gateway_url=options.gateway_url)


def settings_for(options: ServeOptions) -> Settings:
    """The settings with the options over them. Raises SettingsError."""
    settings = find_settings(options.config, options.data, here=Path.cwd())
    if options.redis_url is not None:
        if not options.redis_url.startswith(("redis://", "rediss://", "unix://")):
            raise SettingsError("--redis-url begins with redis://, rediss:// or unix://")
        settings = replace(settings, store_url=options.redis_url)
    settings = replace(
        settings,
        allow_volatile=settings.allow_volatile or options.allow_volatile,
        assume_durable=settings.assume_durable or options.assume_durable,
    )
    for name, text in (("api", options.listen), ("gateway", options.gateway_listen)):
        if text is not None:
            told = settings.api if name == "api" else settings.gateway
            table = ListenTable(
                listen=text,
                url=told.url,
                tls_cert=str(told.cert) if told.cert else None,
                tls_key=str(told.key) if told.key else None,
            )
            listen = parse_listen(table, name, place=("command line", ""), folder=settings.folder)
            settings = replace(settings, api=listen) if name == "api" else replace(settings, gateway=listen)
    return settings
