"""What runs where on Ray: configuration, the Serve application, ranks, the control actor, start and stop.

    serried serve ── supervisor (launcher.py: ports, environment, signals, the last kill; never imports Ray)
        └─ driver (driver.py: Ray, control actor, Serve application, waits for ready, orderly shutdown)
             └─ Ray ─ control actor (control_actor.py; control.py: ledger + membership behind one TCP endpoint)
                    ─ Serve ─ router replicas (router_replica.py) ─ HAProxy in front of them
                            ─ rank replicas (rank.py → rank_server.py → rank_loop.py), one deployment per pool

Ray is our own, on this machine (`own_ray`, `ray_head`), or a cluster that runs, with others on it (`existing_ray`);
both are a `ray_host` to the driver. `node_survey` looks at the nodes, `node_plan` (pure) says what ranks ask for and
get there.

Ray and Serve own placement, health, restarts and the order of life; requests and tokens never pass through them.
A rank registers itself with the control actor and is a member as long as that connection lives; routers learn the
members there, count their requests there, and talk to each rank over a connection of their own.

`config` (every key of it a flag: `flags`), `membership` and `prefix_feed` (what routers hear of a rank's prefix cache)
are pure. The control actor and the routers run on their
process's event loop. A rank has a thread `rank-io` for all its sockets, a thread `rank-steps` that alone touches the
scheduler, where steps are planned ahead a thread `rank-executor` that alone touches the model (`step_executor`), and
threads that compile grammars (`structured_output`, `grammar_matcher`): two, more only while some are stuck, and one for
their deadlines. Threads hand each other messages through the step loop's inbox and the IO loop's callbacks.

On our own Ray every process carries the run's id in its environment (`environment`), so that the supervisor can find
and end whatever outlives an orderly shutdown (`processes`). On another's, the control actor's lease sees to that.
"""
