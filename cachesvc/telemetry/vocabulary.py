"""Every event that the daemon logs: its meaning and its fields. docs/logs.md is written from this.

A log line's ``event`` is one of these names; a test holds every call that logs against them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """``fields``: what a line carries beside time, level and event; "..." stands for more that the meaning names."""

    level: str
    meaning: str
    fields: tuple[str, ...] = ()


REPEATS = "At most 10 lines a minute for one process or user and 60 in all; `unlogged`: lines left out before this one."
"""Meaning of a line that callers can cause at will (``events.LineLimits``)."""

VOCABULARY: dict[str, Event] = {
    # start and end
    "config": Event("info", "The effective configuration, one field a setting.", ("...",)),
    "ready": Event(
        "info",
        "The daemon serves. `port`, `metrics_port`, `web_port`: 0 where there is none.",
        ("socket", "port", "metrics_port", "web_port", "backend", "devices", "epoch", "pid", "seconds"),
    ),
    "draining": Event("info", "The daemon opens nothing new; `live_leases` leases are still live.", ("live_leases",)),
    "start_refused": Event(
        "error", "The daemon could not start, with the reason, such as a taken socket or port.", ("reason",)
    ),
    "start_waits": Event(
        "warning",
        "The lock beside the socket is held by a daemon that starts or ends, or by movers of a killed one, whose "
        "memory is not free yet. The daemon waits for `seconds`, and then refuses to start; for movers, it waits 10 s.",
        ("lock", "holders", "seconds"),
    ),
    "start_beside_movers": Event(
        "warning",
        "Movers of a killed daemon have not ended in 10 s. The daemon starts beside them; GPU memory that they hold is "
        "missing until they end. Remedy: `kill -9` of the processes named.",
        ("lock", "holders"),
    ),
    "stopped": Event("info", "The daemon has ended in order."),
    # devices and memory
    "no_gpu": Event("info", "Backend auto found no GPU and takes shared memory.", ("reason",)),
    "device_ready": Event(
        "info",
        "A GPU with its link's measured figures, by the names of DeviceStatus.",
        ("device", "device_name", "pci", "free_bytes", "pool_bytes", "context_bytes", "..."),
    ),
    "background_copies_budgeted": Event(
        "info",
        "All devices at once store less than their links carry: while an awaited copy runs on one, background copies "
        "of the others keep to this rate together.",
        ("gb_per_second",),
    ),
    "gpu_broken": Event(
        "error",
        "A GPU answers no call any more: its transfers fail from now on. Restart the daemon.",
        ("device", "reason"),
    ),
    "device_lost": Event(
        "warning", "A GPU is broken: nothing new is registered there, readiness is off.", ("device", "reason", "...")
    ),
    "device_back": Event("info", "A broken device works again, with a new mover.", ("device",)),
    "device_pair_refused": Event(
        "warning",
        "Copies from one device to another failed their check: hits there come by the host until the source's mover is "
        "started again.",
        ("source", "target", "reason"),
    ),
    "device_memory_by_handles": Event(
        "warning",
        "The driver of these GPUs has no VMM memory: pools are mapped by IPC handles, and engines on them do not come "
        "back by themselves after a restart of the daemon.",
        ("devices",),
    ),
    "device_memory_lost": Event(
        "warning",
        "The slabs of a device were lost with its mover: `leases` leases are lost, and its replicas' contents.",
        ("device", "reason", "leases"),
    ),
    "memory_kept": Event(
        "error",
        "A model's memory is not given to another one: copies to it hang, and may go on. Restart the daemon.",
        ("model",),
    ),
    "device_loss_broke": Event(
        "error", "A defect: the ledger still counts on memory that is gone.", ("device", "traceback")
    ),
    "mover_died": Event(
        "error", "A device's mover has ended: `jobs` of its jobs fail.", ("device", "pid", "reason", "jobs")
    ),
    "mover_started": Event("warning", "A device has a mover again.", ("device", "pid", "lives")),
    "mover_start_not_waited_for": Event(
        "warning",
        "A mover had not started 15 s after the first one. The daemon serves other devices; this one is broken until "
        "its mover has started.",
        ("device",),
    ),
    "mover_not_started": Event(
        "warning",
        "A mover could not be restarted yet, with the reason and the time of the next attempt.",
        ("device", "again_s", "reason"),
    ),
    "mover_not_closed": Event("warning", "A mover did not end in order.", ("device", "reason")),
    "mover_not_probed": Event("warning", "A mover did not report its device's state.", ("device", "reason")),
    "mover_not_measured": Event(
        "warning",
        "A link could not be measured: its GPU refused, or its mover hung and is started again. Without figures its "
        "device is planned for by defaults.",
        ("device", "reason"),
    ),
    "mover_slab_gone": Event("info", "A slab to free had already ended with its mover.", ("device", "reason")),
    "mover_sheet_gone": Event("info", "Words to close had already ended with their mover.", ("device", "reason")),
    "mover_chunk_refused": Event(
        "warning",
        "A mover refuses chunks of the host pool, which its device does without until it takes them; it is asked again "
        "every minute. Logged once until it has taken them all.",
        ("device", "chunks", "reason"),
    ),
    "mover_chunk_not_told": Event(
        "info", "A mover died before it had mapped a chunk of host memory.", ("device", "reason")
    ),
    "mover_peer_not_told": Event("info", "A mover did not get another one's slab, with the reason.", ("reason",)),
    "mover_loss_not_told": Event("error", "A defect: lost memory has no listener.", ("device", "reason")),
    "mover_record_broke": Event("error", "A defect: a record between daemon and mover broke.", ("kind", "traceback")),
    "mover_burial_broke": Event(
        "error", "A defect: a part of what follows a mover's death broke.", ("device", "traceback")
    ),
    "mover_answer_broke": Event("error", "A defect: a mover's answer broke.", ("question", "traceback")),
    "mover_serves": Event("info", "A mover started by hand serves a daemon.", ("pid",)),
    "serving": Event("info", "New answer of health checks.", ("ready", "live")),
    "copies_are_made_to_fail": Event("warning", "The test flag is on: this share of copies fails.", ("share",)),
    "host_pool_whole": Event("info", "The host pool is populated whole.", ("bytes", "seconds")),
    "host_pool_node": Event("info", "A NUMA node that gets its part of the host pool.", ("node", "gpus")),
    "numa_node_unreadable": Event("warning", "A NUMA node of the system could not be read.", ("node", "error")),
    "numa_not_applied": Event(
        "info", "Memory was not bound to its NUMA node, with the reason.", ("node", "reason", "detail")
    ),
    "numa_library_missing": Event(
        "info", "libnuma is not installed: memory has no NUMA placement.", ("library", "error")
    ),
    "host_pool_filling_failed": Event(
        "error", "The host pool stays smaller than configured, with the reason.", ("ready_chunks", "chunks", "reason")
    ),
    "host_pages_callback_failed": Event("error", "New host pages could not be granted.", ("first_page", "pages")),
    # storage shared by nodes
    "storage_connected": Event("info", "The store's master was found.", ("storage", "master")),
    "storage_unreachable": Event(
        "info", "The store's master is absent; the daemon asks it again.", ("storage", "reason")
    ),
    "storage_memory_refused": Event(
        "warning",
        "The store's client refused memory of the host pool: that memory is not used for storage.",
        ("storage", "size_bytes", "code"),
    ),
    "storage_batch_broke": Event("error", "A defect: a batch of reads or writes has failed."),
    "storage_connect_broke": Event("error", "A defect: no client of the store could be made; the daemon tries again."),
    # other nodes
    "peers_ready": Event("info", "Other nodes can borrow, at these ports.", ("port", "data_port")),
    "peer_failed": Event("info", "Another node did not answer, or wrongly; it rests for a while.", ("peer", "reason")),
    "peer_distrusted": Event(
        "warning",
        "The TLS handshake with another node fails for certificates, with the reason: the daemon borrows "
        "nothing from it. Logged every 5 minutes.",
        ("peer", "reason"),
    ),
    "peer_digest_full": Event(
        "warning",
        "This node has more blocks than its digest can tell apart: other nodes ask it for blocks that it lacks.",
        ("bits", "blocks"),
    ),
    "peer_object_wrong": Event("warning", "Another node sent an object other than the requested one.", ("peer",)),
    "peer_not_asked": Event(
        "warning", "A request named a daemon that this node may not ask, or that has no address.", ("peer", "reason")
    ),
    "peer_name_unknown": Event("warning", "A name in --peers could not be looked up.", ("peers", "reason")),
    "peers_changed": Event("info", "Names in --peers stand for other nodes than before.", ("peers", "left_out")),
    "peer_names_broke": Event("error", "A defect: names in --peers were not looked up."),
    "peer_refused": Event("info", f"A peer without a token tried to borrow. {REPEATS}", ("method", "unlogged")),
    "peer_stream_refused": Event("info", "A connection for bytes had no valid secret."),
    "peer_stream_broke": Event("error", "A defect: a stream of bytes to another node has ended."),
    "peer_job_broke": Event("error", "A defect: a borrow job has failed."),
    "peer_beat_broke": Event("error", "A defect: a heartbeat to other nodes was not sent."),
    # models, leases, processes
    "model_registered": Event(
        "info",
        "A model, or a further replica of one.",
        ("model", "model_name", "display_name", "devices", "device_pages", "host_pages"),
    ),
    "host_tier_missing": Event(
        "warning",
        "A model's engines have no host tier: models before it have all of the host pool. Remedy: engines that name "
        "their part of it (`host_blocks`), or a larger `--host-pool`.",
        ("model", "display_name", "host_pages", "others"),
    ),
    "registration_broke": Event("error", "A defect: a model's pools were not made or not entered.", ("model_name",)),
    "lease_opened": Event("info", "An engine has a lease.", ("lease", "engine", "model", "replica")),
    "lease_joined": Event(
        "info", "A process joined the lease of its engine's other processes.", ("lease", "engine", "model", "replica")
    ),
    "lease_closed": Event("info", "An engine closed its lease.", ("lease", "quiesced")),
    "lease_process_ended": Event(
        "info",
        "A process ended that held a lease; its private pages come back, its sealed blocks stay.",
        ("lease", "engine", "sequences", "private_pages"),
    ),
    "lease_silent": Event("warning", "A lease without a heartbeat for too long is lost.", ("lease", "seconds")),
    "life_connection_refused": Event(
        "warning", f"A process was refused a life connection. {REPEATS}", ("uid", "pid", "reason", "unlogged")
    ),
    "life_connection_dropped": Event(
        "info",
        f"A life connection without lease and lane was closed in favour of others of its user. {REPEATS}",
        ("pid", "uid", "unlogged"),
    ),
    "life_connection_broke": Event(
        "info",
        f"A life connection was closed: it broke, or its peer does not read. {REPEATS}",
        ("pid", "reason", "unlogged"),
    ),
    "life_not_accepting": Event(
        "warning",
        "No descriptor is left for life connections; the daemon tries again after `seconds`.",
        ("reason", "seconds"),
    ),
    "lane_opened": Event(
        "info", f"A process has a lane; `lanes`: of its life connection. {REPEATS}", ("lanes", "unlogged")
    ),
    "lane_closed": Event("info", f"A lane ended, after `calls` calls. {REPEATS}", ("reason", "calls", "unlogged")),
    "lane_refused": Event(
        "warning",
        f"A lane got bytes outside of its protocol, or no valid proof of its caller. {REPEATS}",
        ("reason", "unlogged"),
    ),
    "lane_broke": Event("error", "A defect: a lane could not be served and was ended."),
    "tokens_read": Event("info", "Tokens, peers and quotas are those of the file.", ("entries", "tenants")),
    "token_retired": Event(
        "info",
        "An engine's token left the tokens' file: for this time it still serves the leases that its engine has.",
        ("caller", "tenant", "seconds"),
    ),
    "token_retired_shown": Event(
        "warning",
        "Callers still show a token that left the tokens' file, and lose their leases after this time: give them the "
        "new one. Logged once for each token.",
        ("caller", "tenant", "seconds"),
    ),
    "token_refused": Event(
        "warning",
        "Callers show a token that is revoked or has had its grace. They are refused, heartbeats too, so their leases "
        "are lost as silent. Logged once for each token.",
        ("caller", "tenant"),
    ),
    "tokens_not_read": Event(
        "warning",
        "The tokens' file cannot be used, or is gone; the last reading holds, for this time so far. Logged "
        "every minute.",
        ("reason", "seconds"),
    ),
    "certificate_read": Event(
        "info", "A certificate is served, or shown to other nodes, from now on.", ("certificate",)
    ),
    "certificate_not_read": Event(
        "warning", "The certificate cannot be used; the previous one stays in use.", ("reason",)
    ),
    "reloaded": Event("info", "Settings changed while running, one field each.", ("...",)),
    "reload_refused": Event(
        "warning", "The file has an impossible setting, or one that cannot change live; nothing changed.", ("reason",)
    ),
    "reload_too_early": Event("info", "SIGHUP came before the daemon had started; it reads its files anyway."),
    "reload_by_signal_refused": Event("debug", "A reload by SIGHUP was refused.", ("code",)),
    "process_ended": Event(
        "info", f"An engine's process has ended, by the kernel's report. {REPEATS}", ("pid", "unlogged")
    ),
    "connection_ended": Event(
        "info",
        f"A process counts as gone: its connection ended, and the grace is over. {REPEATS}",
        ("pid", "unlogged"),
    ),
    # transfers and calls
    "transfer_failed": Event(
        "warning", "A transfer failed, with the reason; its waiters get the error.", ("ticket", "reason")
    ),
    "swap_done_callback_failed": Event("error", "A defect: the end of a transfer could not be reported.", ("ticket",)),
    "copy_stream_broken": Event("error", "A defect: a copy stream takes no more jobs. Restart the daemon.", ("name",)),
    "copy_slice_failed": Event("error", "A defect: a slice's end on a broken stream.", ("name",)),
    "copy_waiters_not_released": Event("error", "A defect: waiters of a job were not released.", ("ticket",)),
    "checksums_not_taken": Event("error", "A defect: blocks have no checksums.", ("model", "blocks")),
    "page_not_read": Event(
        "info",
        "A page was not read for its checksum; those after it with the same reason are not logged.",
        ("model", "page", "reason"),
    ),
    "subscriber_cut_off": Event("warning", "A subscriber fell behind the event history.", ("behind", "kept")),
    "subscriber_hung": Event("info", "A subscriber that was cut off did not take its status.", ("reason",)),
    "copy_done_callback_failed": Event("error", "A defect: the end of a copy could not be reported.", ("ticket",)),
    "weights_announced": Event(
        "info",
        "An operator announced the version of weights that a model's engines load next.",
        ("model", "version", "previous"),
    ),
    "pinned": Event(
        "info",
        "An operator keeps a prefix from eviction for a time; `key`: first digits of its last block's key.",
        ("model", "key", "blocks", "seconds"),
    ),
    "unpinned": Event("info", "An operator ended a pin before its time.", ("model", "key", "blocks")),
    "pin_expired": Event("info", "The time of an operator's pin is over.", ("model", "key", "blocks")),
    "evicted_by_operator": Event("info", "An operator had blocks evicted.", ("model", "tier", "blocks")),
    "tokens_watch_broke": Event("error", "A defect: the check of the tokens' file failed; the daemon tries again."),
    "sweep_broke": Event("error", "A defect: the search for silent leases failed; the daemon tries again."),
    "device_look_broke": Event("error", "A defect: the check of the devices failed; the daemon tries again."),
    "call_broke": Event(
        "error",
        "A defect: a call failed inside the daemon; the traceback says where. `model` 0: of none.",
        ("method", "model"),
    ),
    "chore_refused": Event("warning", "The rest of a long flow was refused; nothing is lost.", ("model", "reason")),
    "chore_broke": Event("error", "A defect: the rest of a long flow failed.", ("model",)),
    "landing_broke": Event("error", "A defect: the landing of a transfer failed.", ("ticket",)),
    "model_distrusted": Event(
        "warning",
        "A call of the model met a defect: the model is out of service until Verify finds it sound.",
        ("model", "reason"),
    ),
    "model_trusted": Event("info", "Verify found the model sound; it is served again.", ("model",)),
    # storage
    "storage_ready": Event(
        "info", "The storage tier reads and writes for the first time; the scan for its objects goes on.", ("storage",)
    ),
    "storage_given_up": Event(
        "warning",
        "A storage tier is not used now, and is tried again by itself; prompts are computed instead. `times`: since "
        "the line before, of which there is one a minute at most.",
        ("tier", "reason", "times"),
    ),
    "storage_used_again": Event(
        "info",
        "A storage tier that was given up is used again. `seconds`: time for which it was not.",
        ("tier", "seconds"),
    ),
    "storage_calls_hang": Event(
        "warning",
        "Reads or writes of objects have not come back in time, and hold their host pages until they do.",
        ("tier", "objects"),
    ),
    "storage_calls_back": Event("info", "No read or write of an object hangs any more.", ("tier",)),
    "storage_purged": Event(
        "info", "An operator removed objects; an empty name: of all models.", ("model_name", "objects")
    ),
    "storage_not_direct": Event("info", "The filesystem refuses direct I/O: the page cache is used.", ("folder",)),
    "storage_read_failed": Event(
        "info",
        "Objects could not be read, the last for this reason; they are computed instead. `objects`: since the line "
        "before. At most one line a minute.",
        ("reason", "objects"),
    ),
    "storage_write_failed": Event(
        "info",
        "Objects could not be written, the last for this reason. `objects`: since the line before. At most one line a "
        "minute.",
        ("reason", "objects"),
    ),
    "storage_not_listed": Event(
        "info",
        "The bucket could not be listed, the last time for this reason; the daemon tries again. `objects`: tries since "
        "the line before. At most one line a minute.",
        ("reason", "objects"),
    ),
    "storage_keeps_nothing": Event(
        "warning", "A flag keeps all blocks from the storage; change it, or leave the storage out.", ("flag", "reason")
    ),
    "storage_flush_began": Event(
        "info",
        "The daemon ends, and writes blocks that were used again, the best first, for `seconds` at most.",
        ("blocks", "seconds"),
    ),
    "storage_flush_progress": Event("info", "Blocks that are still to be written before the end.", ("blocks", "left")),
    "storage_flushed": Event(
        "info",
        "The flush is over. `left`: blocks that were not written in the time that `--drain-seconds` gives.",
        ("blocks", "left", "seconds"),
    ),
    "storage_disk_refuses": Event(
        "warning",
        "The disk takes no writes: it is full, or mounted for reading. What is there is served, and writes are tried "
        "again.",
        ("reason",),
    ),
    "storage_disk_takes_writes": Event("info", "The disk takes writes again.", ("folder",)),
    "storage_folder_gone": Event(
        "warning",
        "The folder of the storage, or its disk, is gone. Storage is not used until it is back.",
        ("folder", "reason"),
    ),
    "storage_folder_refused": Event(
        "warning",
        "The folder of the storage is something else's, of another format, or cannot be used. The daemon serves from "
        "memory, and uses the folder once it is right.",
        ("folder", "reason"),
    ),
    "storage_folder_unread": Event(
        "warning", "A folder of objects could not be listed: these are not found.", ("folder", "reason")
    ),
    "storage_not_removed": Event(
        "warning",
        "Files that were to go cannot be removed, the last for this reason: they still count, and are tried again. "
        "`files`, `size_bytes`: all of them. Logged once a minute.",
        ("reason", "files", "size_bytes"),
    ),
    "storage_label_not_kept": Event("warning", "A model's name could not be kept beside its objects.", ("reason",)),
    "storage_scan_broke": Event("error", "A defect: the scan of the folder failed; the daemon tries again."),
    "storage_job_broke": Event("error", "A defect: a job of a storage engine or tier was refused."),
    "storage_news_broke": Event("error", "A defect: news of stored blocks could not be handled.", ("model",)),
    # telemetry itself
    "metrics_push_failed": Event("warning", "A reading was not taken or sent; the next one may be.", ("reason",)),
    "scrape_failed": Event("error", "A defect: the page of metrics could not be made; the scraper got none."),
    "log_lines_lost": Event("warning", "Standard error was full or closed, and lost lines.", ("lines",)),
    "library_log": Event("info", "A library's message, at its level.", ("logger", "text")),
}
