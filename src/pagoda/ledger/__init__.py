"""The ledger of a local tier: which chunk is in which slot, for any number of processes,
crash-safe.

Modules, in the order in which a request reaches them:

    ledger              `Ledger`: the calls of an engine, and opening, sharing and closing a store's
                        ledger
    slot_writer         `SlotWriter`: reserves, lends views, commits, and gives up the rest
    admin               the calls of an operator, and of tiers that need an error if they fail:
                        list, pin, remove, clear
    rebuild             fills an empty ledger from the headers of a slab
    outcomes            the answers, as values
    session             this process's part in a store: open tables, its member, running
                        transactions
    call_tokens         what a call owns, and how that is given up if the call is interrupted
    gate_bell           where processes sleep until the gate is released
    locks               byte-range locks between processes, and the gate
    transaction         one write transaction: what it changes in the tables, and publishes in the
                        columns
    allocation          steps of a transaction: reserve, commit, abort, adopt
    hold_pin_remove     steps of a transaction: hold, pin, remove, vacate
    members             steps of a transaction: members, and what dead ones left
    clears_and_labels   steps of a transaction: clears, labels, and what outlives the tables
    namespace_registry  labels and clears, where they outlive the tables
    clear_log           the two files that say what was cleared
    clearing            `Clearing`: clears chunks, in steps that another process can end
    namespace_slots     which slots may have chunks of a namespace: hints for clears
    queries             what read transactions look up
    lmdb_tables         the LMDB tables: everything that must be right
    columns             the mapped columns: hints for policies, and the published generations
    ghost_table         what is remembered of chunks that have gone
    ghost_pages         the file of the ghosts of a store that grows: as many as its slots need
    hint_pages          the memory of columns, counters and the like, and what a store on disk saves
                        of it
    compare_hints       lets the columns of a store on disk say what its tables say
    table_pages         the pages of tables on a disk, tested before they are read
    member_counters     the mapped counters, one row per member
    chunk_notes         what an engine keeps with its chunks, to report them to routers after a
                        restart
    request_ring        the last requests, with the reason why each got no more tokens
    request_meters      what each model and each tenant asked for, hit, loaded and computed
    eviction_policy     `Evictor`: the one way to the policy
    retained_chunks     chunks that are evicted after all others, up to a budget
    request_contexts    what requests say of themselves, for the chunks of one store
    session_numbers     numbers of sessions, for the columns
    upkeep_thread       the thread on which a policy learns and ranks
    growth_thread       the thread that asks for more slots with pages, before they are needed
    slots_in_use        which slots of a slab in memory are read or written, so that their pages
                        stay
    slab_pages          which slots of a slab have pages, and how a store gives pages up
    space_sharing       how the stores of one root share its space
    root_usage          what the stores of one root hold, and their limit
    store_directory     open, create, resize and rebuild a store's directory
    stores_under_root   which stores a root has; its lock; removing a store
    epoch_record        how often the weights of a model were changed in place, as a root knows it
    guard_watch         the thread that sees when files of an open store are removed or replaced
    store_state         the state file of a store, the names of its files, and what it vouches for
    store_stats         `StoreStats`: what people and monitors are shown of a store
    store_names         one short name for each store, for people
    table_integrity     whether tables can be trusted: checksums, the check of all rows
"""

from pagoda.ledger.columns import Columns
from pagoda.ledger.ledger import Ledger
from pagoda.ledger.outcomes import (
    Busy,
    ChunkRow,
    CommitResult,
    Match,
    Miss,
    NamespaceRow,
    Outcome,
    Present,
    Refused,
    Report,
    Reserved,
    RunToReserve,
    ScannedChunk,
)
from pagoda.ledger.slot_writer import SlotWriter
from pagoda.ledger.store_directory import StoreSpec

__all__ = [
    "Busy",
    "ChunkRow",
    "Columns",
    "CommitResult",
    "Ledger",
    "Match",
    "Miss",
    "NamespaceRow",
    "Outcome",
    "Present",
    "Refused",
    "Report",
    "Reserved",
    "RunToReserve",
    "ScannedChunk",
    "SlotWriter",
    "StoreSpec",
]
