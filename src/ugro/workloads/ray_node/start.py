"""What a rank runs instead of ``ray start``: the same, but for three things. It is text, since Ray's Python runs it.

- Ray gives a raylet 30 seconds to be known, and the raylet gives its agent 15 to say at which port it listens, which a
  slow or busy machine exceeds. The rank itself sees a raylet that has ended, so nobody else need hurry; and the port
  is fixed, so it is written down before the raylet looks for it.
- Somebody without the cluster's token who connects by ``ray.init("ray://…")`` gets an answer that says so. Ray's own
  client takes a refusal for a server that is not ready yet, and gives up after half a minute with a timeout.
- Each client gets a process of its own on the head. All heads of a machine would look for its port from 23000 on, and
  take one that another has just found free. It ends if nobody asks it for half a minute, while gRPC pauses for longer
  and longer between its attempts to reach it.

Where a Ray has other parts than the one that this was written for, it runs as it is.
"""

from __future__ import annotations

import os

from ugro.workloads.ray_node.rules import PATIENCE_S

REFUSAL = (
    'this Ray cluster wants its token: run eval "$(ugro cluster env)" in the shell that starts the program, or give it '
    "RAY_AUTH_MODE=token and a file with the token as RAY_AUTH_TOKEN_PATH"
)
_START, _CLIENT_SERVER = "start.py", "client_server.py"
_FIRST_CLIENT, _CLIENTS, _BLOCKS = 23_000, 250, 39  # up to where the kernel gives out ports
_STARTING = f"""
import inspect, os, sys, time
import ray
from ray._private import services
from ray.scripts.scripts import main

def patient(find):
    def found(*words, **more):
        end = time.monotonic() + {PATIENCE_S}
        while True:
            try:
                return find(*words, **more)
            except RuntimeError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.1)
    return found

def telling(start):
    def started(command, *words, **more):
        module = "ray.util.client.server"
        if module in command and "--mode=proxy" in command:
            ours = os.path.join(os.path.dirname(os.path.abspath(__file__)), "{_CLIENT_SERVER}")
            command = [command[0], ours, *command[command.index(module) + 1:]]
        return start(command, *words, **more)
    return started

def foretelling(start):
    def started(*words, **more):
        try:
            from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port
            given = inspect.signature(start).bind(*words, **more).arguments
            port = given["dashboard_agent_listen_port"]
            persist_port(given["session_dir"], given["node_id"], DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
        except (ImportError, KeyError, TypeError, OSError) as error:
            print("the raylet waits for its agent's port:", error)
        return start(*words, **more)
    return started

for name, wrap in (("get_node", patient), ("start_raylet", foretelling), ("start_ray_process", telling)):
    if hasattr(services, name):
        setattr(services, name, wrap(getattr(services, name)))
sys.argv[0] = "ray"
main()
"""

# Without a token, the first two calls of Ray's client are answered: a greeting with nothing in it, and the refusal.
_SERVING = f"""
import runpy, sys, threading
import ray  # before grpc, for which it chooses settings

def tell():
    import grpc
    from ray._private.authentication import grpc_authentication_server_interceptor as guard
    from ray.core.generated import ray_client_pb2 as messages

    is_known = guard._authenticate_request

    def greet(request, context):
        return messages.ClusterInfoResponse(json="{{}}")

    places = threading.Semaphore(16)  # of the server's 100 threads: a stranger may say nothing

    def refuse(requests, context):
        if not places.acquire(blocking=False):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, {REFUSAL!r})
        late = threading.Timer(30.0, context.cancel)
        try:
            late.start()
            # Until the client ends it: one whose stream ends first forgets what it was told.
            for request in requests:
                if request.WhichOneof("type") == "init":
                    no = messages.InitResponse(ok=False, msg={REFUSAL!r})
                    yield messages.DataResponse(req_id=request.req_id, init=no)
        finally:
            late.cancel()
            places.release()

    answers = {{
        "/ray.rpc.RayletDriver/ClusterInfo": (grpc.unary_unary_rpc_method_handler, greet),
        "/ray.rpc.RayletDataStreamer/Datapath": (grpc.stream_stream_rpc_method_handler, refuse),
    }}

    class Telling(guard.SyncAuthenticationServerInterceptor):
        def intercept_service(self, continuation, details):
            if details.method not in answers or is_known(details.invocation_metadata):
                return super().intercept_service(continuation, details)
            make, answer = answers[details.method]
            known = continuation(details)
            return make(answer, known.request_deserializer, known.response_serializer)

    guard.SyncAuthenticationServerInterceptor = Telling

def prepare_clients():
    from ray.util.client.server import proxier

    own = next(int(word[7:]) for word in sys.argv if word.startswith("--port="))
    proxier.MIN_SPECIFIC_SERVER_PORT = {_FIRST_CLIENT} + own % {_BLOCKS} * {_CLIENTS}
    proxier.MAX_SPECIFIC_SERVER_PORT = proxier.MIN_SPECIFIC_SERVER_PORT + {_CLIENTS}
    proxier.GRPC_OPTIONS = [*proxier.GRPC_OPTIONS, ("grpc.max_reconnect_backoff_ms", 2000)]

prepare_clients()
try:
    tell()
except (ImportError, AttributeError) as error:
    print("clients without the token get no reason:", error)
runpy.run_module("ray.util.client.server", run_name="__main__")
"""


def write_programs(folder: str) -> str:
    """Returns the path of the program that takes the words of ``ray start``."""
    for name, text in ((_START, _STARTING), (_CLIENT_SERVER, _SERVING)):
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)
    return os.path.join(folder, _START)
