"""HAProxy's configuration for the door of a service: settings and servers in, text out.

It also runs on nodes, as a part of the door's program: Python 3.9 and its standard library alone. The text names files
of the folder that HAProxy runs in, and descriptors that it inherits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

REPLICAS, CANARY, WAITING = "replicas", "canary", "waiting"
KEYS, SHARE, CERTIFICATE, WAITING_SOCKET, STATES = "keys.map", "share.map", "door.pem", "waiting", "states"
SHARE_KEY, WHOLE = "canary", 1000  # shares are in thousandths
LOG_FIELDS = ("%b", "%s", "%ST", "%TR", "%Tw", "%Ta", "%sc", "%rc", "%tsc")
_BUFFER = 64 * 1024  # a request that fits can be given to another replica
_FOREVER = "20d"
_IDEMPOTENT = "GET HEAD OPTIONS PUT DELETE"
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2; 1.3 has no others
_ERRORS = {
    400: ("invalid_request_error", "the request is malformed, or its headers are too large"),
    408: ("timeout", "the request did not arrive in time"),
    500: ("server_error", "the door failed"),
    502: ("server_error", "the replica ended before it had answered"),
    503: ("server_error", "no replica is ready"),
    504: ("timeout", "the replica did not answer in time"),
}
_RETRY_AFTER_S = 5
_STATE_FIELDS = (
    "be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight "
    "srv_time_since_last_change srv_check_status srv_check_result srv_check_health srv_check_state srv_agent_state "
    "bk_f_forced_id srv_f_forced_id srv_fqdn srv_port srvrecord srv_use_ssl srv_check_port srv_check_addr "
    "srv_agent_addr srv_agent_port"
)


class Descriptors:
    """What HAProxy inherits."""

    def __init__(self, listener: int, admin: int, log: int, inside: int) -> None:
        self.listener, self.admin, self.log, self.inside = listener, admin, log, inside


def configuration(
    settings: Mapping[str, Any], servers: Iterable[Mapping[str, Any]], fds: Descriptors, secret: str, threads: int
) -> str:
    known = list(servers)
    parts = [
        _global(settings, fds, threads),
        _defaults(settings),
        _frontend(settings, fds, secret),
        *([_inside(fds)] if settings["wait_s"] else []),
        _backend(settings, REPLICAS, known),
        _backend(settings, CANARY, known),
    ]
    return "\n\n".join("\n    ".join(part) for part in parts) + "\n"


def server_words(settings: Mapping[str, Any], server: Mapping[str, Any], backend: str) -> str:
    """Of a ``server`` line, and of the runtime command that adds one.

    The canaries' backend has the other servers, too, for requests that the canaries drop.
    """
    words = [_address(server), f"weight {server['weight']}", f"maxconn {limit(settings, server)}"]
    if backend == REPLICAS and settings["balance"] == "first":
        words.append(f"id {_place(server)}")
    if backend == CANARY and not server["canary"]:
        words.append("backup")
    every = f"{int(settings['health_interval_s'] * 1000)}ms"
    quick = f"{max(200, int(settings['health_interval_s'] * 250))}ms"
    words += ["check", f"inter {every} fastinter {quick} downinter {quick} fall 3 rise 1"]
    # Who refuses a connection gets no more until it passes a check; the request goes to another one.
    return " ".join([*words, "observe layer4 error-limit 1 on-error mark-down"])


def states(down: Iterable[Mapping[str, Any]]) -> str:
    """HAProxy's file of the states with which servers start: these are down until a check passes."""
    lines = [
        f"1 {backend} 1 {server['name']} {server['address']} 0 0 {server['weight']} {server['weight']} "
        f"0 1 0 0 6 0 0 0 - {server['port']} - 0 0 - - 0"
        for server in down
        for backend in backends_of(server)
    ]
    return "\n".join(["1", f"# {_STATE_FIELDS}", *lines, ""])


def limit(settings: Mapping[str, Any], server: Mapping[str, Any]) -> int:
    """Never none: HAProxy 2.8 gives requests that wait to a server that becomes ready only if that has a limit."""
    return int(server["limit"] or settings["most_connections"])


def backends_of(server: Mapping[str, Any]) -> list[str]:
    return [CANARY] if server["canary"] else [REPLICAS, CANARY]


def error_body(kind: str, sentence: str) -> str:
    """As OpenAI's clients expect it."""
    return json.dumps({"error": {"message": sentence, "type": kind, "param": None, "code": None}})


def _address(server: Mapping[str, Any]) -> str:
    address = str(server["address"])
    return f"[{address}]:{server['port']}" if ":" in address else f"{address}:{server['port']}"


def _place(server: Mapping[str, Any]) -> int:
    """The heavier comes first; between equal ones the number of the server decides."""
    return (1 + 256 - int(server["weight"])) * 10_000 + int(server["number"]) % 10_000


def _global(settings: Mapping[str, Any], fds: Descriptors, threads: int) -> list[str]:
    return [
        "global",
        f"stats socket fd@{fds.admin} level admin",
        f"log fd@{fds.log} len 256 format raw local0",
        f"nbthread {threads}",
        f"maxconn {settings['most_connections']}",
        f"server-state-file {STATES}",
        f"hard-stop-after {_ms(settings['drain_s'])}",
        f"tune.bufsize {_BUFFER}",
        "ssl-default-bind-options ssl-min-ver TLSv1.2 no-tls-tickets",
        f"ssl-default-bind-ciphers {_CIPHERS}",
    ]


def _defaults(settings: Mapping[str, Any]) -> list[str]:
    errors = [_http_error(status, *text) for status, text in _ERRORS.items()]
    return [
        "defaults",
        "mode http",
        "option dontlognull",
        "load-server-state-from-file global",
        "option abortonclose",
        "option http-server-close",
        "option clitcpka",
        "option srvtcpka",
        "srvtcpka-idle 5s",
        "srvtcpka-intvl 3s",
        "srvtcpka-cnt 3",
        "timeout connect 5s",
        "timeout http-request 15s",
        "timeout http-keep-alive 60s",
        "timeout client 60s",
        "timeout client-fin 5s",
        f"timeout server {_ms(settings['answer_s'])}",
        f"timeout tunnel {_ms(max(3600.0, settings['answer_s']))}",
        f"timeout queue {_ms(settings['wait_s'] or 1.0)}",
        f"timeout check {_ms(settings['health_timeout_s'])}",
        *errors,
    ]


def _frontend(settings: Mapping[str, Any], fds: Descriptors, secret: str) -> list[str]:
    tls = f" ssl crt {CERTIFICATE} alpn h2,http/1.1" if settings["certificate"] else ""
    return [
        "frontend door",
        f"bind fd@{fds.listener}{tls}",
        "log global",
        f'log-format "{" ".join(LOG_FIELDS)}"',
        "acl has_id req.hdr(x-request-id) -m reg ^[A-Za-z0-9._:-]{1,128}$",
        "http-request set-var(txn.id) req.hdr(x-request-id) if has_id",
        "http-request set-var(txn.id) uuid() unless has_id",
        "http-after-response set-header X-Request-Id %[var(txn.id)]",
        *(_keys() if settings["needs_key"] else []),
        *_limits(settings),
        "http-request set-header X-Request-Id %[var(txn.id)]",
        "http-request set-header X-Forwarded-For %[src]",
        f"http-request set-header X-Forwarded-Proto {'https' if tls else 'http'}",
        "http-request set-header X-Forwarded-Host %[req.hdr(host)] if { req.hdr(host) -m found }",
        *_authorization(settings, secret),
        f"http-request set-var(txn.share) str({SHARE_KEY}),map_str_int({SHARE},0)",
        f"use_backend {CANARY} if {{ rand({WHOLE}),sub(txn.share) lt 0 }}",
        f"default_backend {REPLICAS}",
    ]


def _keys() -> list[str]:
    body = error_body("invalid_request_error", "a valid API key is needed: Authorization: Bearer KEY")
    return [
        f"acl is_known http_auth_bearer,sha2(256),hex,lower,map_str({KEYS}) -m found",
        f"{_returned(401, body)} hdr WWW-Authenticate Bearer unless is_known",
    ]


def _limits(settings: Mapping[str, Any]) -> list[str]:
    found = []
    if most := settings["most_body_bytes"]:
        too_large = error_body("invalid_request_error", f"the body is larger than {most} bytes")
        unknown = error_body("invalid_request_error", "the body needs a Content-Length")
        second = "{ req.ver 2.0 } !{ req.hdr(content-length) -m found }"
        found += [
            # Of a number with too many digits, HAProxy would compare the lowest 32 bits.
            f"{_returned(413, too_large)} if {{ req.hdr(content-length),length gt {len(str(most))} }}",
            f"{_returned(413, too_large)} if {{ req.hdr_val(content-length) gt {most} }}",
            f"{_returned(411, unknown)} if {{ req.hdr(transfer-encoding) -m found }}",
            # In HTTP/2 a body without a length has no such header: whether there is one shows when it comes.
            f"http-request wait-for-body time 15s at-least 1 if {second} !{{ req.hdr(upgrade) -m found }}",
            f"{_returned(411, unknown)} if {second} {{ req.body_size gt 0 }}",
        ]
    busy = error_body("server_error", f"{settings['most_waiting']} requests wait already")
    after = f"hdr Retry-After {_RETRY_AFTER_S}"
    return [*found, f"{_returned(503, busy)} {after} if {{ queue({REPLICAS}) ge {settings['most_waiting']} }}"]


def _authorization(settings: Mapping[str, Any], secret: str) -> list[str]:
    if secret:
        return [f'http-request set-header Authorization "Bearer {secret}"']
    return ["http-request del-header Authorization"] if settings["needs_key"] else []


def _inside(fds: Descriptors) -> list[str]:
    """By which the program takes the one place of the waiting server."""
    return ["frontend inside", f"bind fd@{fds.inside}", f"timeout client {_FOREVER}", f"default_backend {REPLICAS}"]


def _backend(settings: Mapping[str, Any], name: str, servers: Iterable[Mapping[str, Any]]) -> list[str]:
    lines = [
        f"backend {name}",
        f"balance {settings['balance'] if name == REPLICAS else 'leastconn'}",
        "retries 3",
        "option redispatch 1",
        "retry-on conn-failure empty-response response-timeout",
        "option allbackups",
        "option http-buffer-request",
    ]
    if not settings["retries_posts"]:
        lines.append(f"http-request disable-l7-retry unless {{ method {_IDEMPOTENT} }}")
    if path := settings["health_path"]:
        lines += ["option httpchk", f"http-check send meth GET uri {path} ver HTTP/1.1 hdr host door"]
        least, most = settings["health_status"]
        lines.append(f"http-check expect status {int(least)}-{int(most)}")
    if name == REPLICAS and settings["wait_s"]:
        lines += _waiting()
    return lines + [
        f"server {server['name']} {server_words(settings, server, name)}"
        for server in servers
        if name in backends_of(server)
    ]


def _waiting() -> list[str]:
    """A server with one place, which the program takes itself: who comes while no replica is ready waits for it.

    HAProxy gives such requests to a replica as soon as one is ready, whatever their size.
    """
    return [
        f"http-request set-timeout server {_FOREVER} if {{ fe_name inside }}",
        f"use-server {WAITING} if {{ fe_name inside }}",
        f"server {WAITING} unix@{WAITING_SOCKET} backup maxconn 1",
    ]


def _http_error(status: int, kind: str, sentence: str) -> str:
    after = f" hdr Retry-After {_RETRY_AFTER_S}" if status == 503 else ""
    return f"http-error status {status} content-type application/json string '{error_body(kind, sentence)}'{after}"


def _returned(status: int, body: str) -> str:
    return f"http-request return status {status} content-type application/json string '{body}'"


def _ms(seconds: float) -> str:
    return f"{int(seconds * 1000)}ms"
